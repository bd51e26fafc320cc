"""The broker room as a program: ``python -I -m ral_broker``, or ``python -I …/ral_broker/__main__.py``.

The second form is what the client uses: an isolated interpreter does not search a user's own site directory
(``pip install --user``) or a prefix, so this file adds the directory that it lies in, behind all others.
"""

import sys

if not __package__:
    sys.path.append(__file__.rpartition("/ral_broker/")[0])

from ral_broker.main import main

sys.exit(main(sys.argv[1:]))

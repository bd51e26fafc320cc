"""``python -I -m ral_broker``."""

import sys

from ral_broker.main import main

sys.exit(main(sys.argv[1:]))

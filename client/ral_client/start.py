"""First file of every client: run as ``python3 -I -S start.py IGNORED-SIGNALS ARGUMENT…``.

A script is compiled anew at every start, a module is not: so this file holds nothing.
"""

if __name__ == "__main__":
    import sys

    sys.path.append(__file__.rpartition("/ral_client/")[0])
    from ral_client.main import main

    main(sys.argv)

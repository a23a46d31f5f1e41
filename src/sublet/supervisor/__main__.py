"""`python -I -S …/supervisor/__main__.py DIRECTORY`: watch over the instance of this directory until all of it is gone.

Run as a file, because Python is up sooner when it does not look for packages: this needs none.

`python -m sublet.supervisor --stacks DIRECTORY`: write down where its processes stand.
`python -m sublet.supervisor --mpi COMMAND`: the program of an instance under `launcher: mpi`, see mpi.py.
"""

import sys

if not __package__:
    sys.path.insert(0, __file__.rpartition("/sublet/")[0])

if sys.argv[1] == "--stacks":
    from sublet.supervisor.stacks import collect

    collect(sys.argv[2])
elif sys.argv[1] in ("--mpi", "--mpi-agent"):
    from sublet.supervisor import mpi

    sys.exit(mpi.main(sys.argv[2:]) if sys.argv[1] == "--mpi" else mpi.agent(sys.argv[2:]))
else:
    from sublet.supervisor.watch import watch

    watch(sys.argv[1])

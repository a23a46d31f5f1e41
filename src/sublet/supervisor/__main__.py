"""`python -m sublet.supervisor DIRECTORY`: watch over the instance of this directory until all of it is gone.

`python -m sublet.supervisor --stacks DIRECTORY`: write down where its processes stand.
"""

import sys

if sys.argv[1] == "--stacks":
    from sublet.supervisor.stacks import collect

    collect(sys.argv[2])
else:
    from sublet.supervisor.watch import watch

    watch(sys.argv[1])

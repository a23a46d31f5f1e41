"""`python -m sublet.supervisor DIRECTORY`: watch over the instance of this directory until all of it is gone."""

import sys

from sublet.supervisor.watch import watch

watch(sys.argv[1])

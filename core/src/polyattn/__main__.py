"""`python -m polyattn`: the command line where its script is not on the path."""

import sys

from polyattn.cli import main

sys.exit(main())

import sys

try:
    from .cli import main
except KeyboardInterrupt:
    sys.exit(130)

main()

"""Convert a Hugging Face T5 checkpoint: python convert.py --model google/flan-t5-small."""

import sys

try:
    from speculative_t5.cli import convert_main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    convert_main()

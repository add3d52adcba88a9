"""Convert a Hugging Face T5 checkpoint: python convert.py --model t5-small."""

from speculative_t5.cli import convert_main

if __name__ == "__main__":
    convert_main()

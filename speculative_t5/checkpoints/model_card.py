"""The model card of a folder for others: README.md, with what the Hugging Face Hub reads of it."""

from __future__ import annotations

import json
from pathlib import Path

from .._version import __version__
from ..errors import printable
from .model_folder import CHECKOUT_FOLDER, PACKAGE_FOLDER, ModelFolder

PROJECT = "speculative_t5"
SHIPPED_LICENSE = "cc-by-2.0"  # of the weights that this package comes with


def model_card(source: ModelFolder, name: str, base: str | None, bits: int | None) -> str:
    """Return the card of a model that was made of `source`; `base` is a repository, if known."""
    about: dict[str, str | list[str]] = {"library_name": "mlx"}
    if base is not None:
        about["base_model"] = base
    about["pipeline_tag"] = "translation" if _is_translator(source) else "text2text-generation"
    license_file = shipped_license(source.path)
    if license_file:
        about["license"] = SHIPPED_LICENSE
    about["tags"] = ["mlx", PROJECT]
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in about.items())
    stored = f", with matrices in {bits} bits" if bits else ""
    made_of = printable(base or source.path.name)
    text = f"""---
{front}
---

# {name}

{made_of} as safetensors for [MLX](https://github.com/ml-explore/mlx){stored}, under the names that
transformers has. Made by {PROJECT} {__version__}.

```sh
python -m {PROJECT} --model {name} --prompt "..."
```

```python
from {PROJECT} import SpeculativeDecoder

decoder = SpeculativeDecoder.from_pretrained("{name}")
print(decoder.generate("...").text)
```
"""
    if license_file:
        attribution = license_file.read_text(encoding="utf-8").strip()
        text += f"\n## Licence and attribution\n\n{attribution}\n"
    return text


def shipped_license(path: Path) -> Path | None:
    """Return the licence of a folder's weights, if this package comes with them."""
    shipped = (CHECKOUT_FOLDER or PACKAGE_FOLDER) / "weights"
    found = shipped / "LICENSE"
    return found if path.resolve().parent == shipped.resolve() and found.is_file() else None


def _is_translator(source: ModelFolder) -> bool:
    return bool(source.tokenizer().vocabulary.languages or source.config.get("languages"))

"""The small demo models: what they are called and where their files lie.

Owns the two checkpoints shipped as package data and the scripts that make and
measure them. Leaves serving them to `stack` and `engines`. Importing this
package needs nothing but the standard library; `train` needs torch and
transformers, `measure` needs vLLM.
"""

from pathlib import Path

MODELS_DIR = Path(__file__).parent / "models"
NAMES = ("tiny-moe", "tiny-dense")


def checkpoint_path(name: str) -> Path:
    """The folder of a shipped demo checkpoint.

    Raises KeyError for a name that is not in `NAMES`.
    """
    if name not in NAMES:
        raise KeyError(f"no demo model is called {name!r}; there are: {', '.join(NAMES)}")
    return MODELS_DIR / name

"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

Its compiled operators do not load there, and the import then fails on two of them that it describes
all the same. This declares these two, in the environment whose Python runs it. Whoever calls them
still fails; resizing and normalising, which engines use, are torch's own and work. Run it after
an install: `.venv-vllm/bin/python tools/cpu_torchvision.py`. Not for environments with a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

MARK = "# Declared by Triptych's set-up"
DECLARED = f"""

if not _has_ops():  {MARK}: the compiled operators are for CUDA.
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    found = importlib.util.find_spec("torchvision")  # which does not import it
    if found is None or found.origin is None:
        raise SystemExit("There is no torchvision in this environment.")
    file = Path(found.origin).parent / "extension.py"
    text = file.read_text()
    if MARK not in text:
        file.write_text(text + DECLARED)
    import torchvision

    print(f"torchvision {torchvision.__version__} can be imported.")


if __name__ == "__main__":
    main()

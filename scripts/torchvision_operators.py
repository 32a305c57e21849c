"""Lets a CUDA build of torchvision import beside a CPU build of torch.

Copied into the virtual environment's site-packages by `make setup`, and only
where torchvision does not import without it. torchvision registers a fake
kernel for `nms` when it is imported, for which the operator must exist; its own
library, which defines it, cannot load without CUDA. Nothing here calls the
operator: transformers' image processors import torchvision and no more.
"""

import sys


class _DefineOperatorsFirst:
    """Defines the two operator schemas just before torchvision is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # The definitions last as long as the object that made them.
            _KEPT.append(self)
        return None


_KEPT: list[_DefineOperatorsFirst] = []
sys.meta_path.insert(0, _DefineOperatorsFirst())

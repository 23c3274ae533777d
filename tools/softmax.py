"""The paper's compressor with a softmax instead of the ReLU and (7): `--compressor softmax`."""

from torch import Tensor

from lococo import COMPRESSORS, Compressor


class SoftmaxCompressor(Compressor):
    """It lies between the paper's compressor and ours."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return self.conv(entries).softmax(dim=-1)


COMPRESSORS["softmax"] = SoftmaxCompressor

"""SigLIP's tower: pre-norm blocks over the patches alone, with a norm behind the last."""

from transformers.models.siglip import modeling_siglip as modeling

from nnterp import components


class Vision(components.Vision):
    """SigLIP's tower: one row per image."""

    NORM = "post_layernorm"


class Layer(components.VisionLayer):
    """SigLIP's block."""


class Attention(components.VisionAttention):
    """SigLIP's attention."""


class Mlp(components.VisionMlp):
    """SigLIP's feed-forward, of a block or of the head that pools an image to one vector."""

    @property
    def refused(self) -> dict[str, str]:
        if isinstance(self.parent, Layer):
            return super().refused
        return dict.fromkeys(self.values(), "it is in the head that pools an image to one vector, which no text reads")


ENVOYS = {
    modeling.SiglipVisionModel: Vision,
    modeling.SiglipEncoderLayer: Layer,
    modeling.SiglipAttention: Attention,
    modeling.SiglipMLP: Mlp,
}

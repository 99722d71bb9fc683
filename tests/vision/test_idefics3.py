"""Idefics 3 and SmolVLM: crops of an image and the whole of it."""

import pytest
import torch

from nnterp.testing import CLIP_BLOCK, VisionSuite, mistake
from nnterp.testing.comparing import assert_close


class TestIdefics3(VisionSuite):
    """Features put in by a method, sixteen patches of a crop made four."""

    FAMILY = "llama"
    SPECIAL = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    CONFIG = {
        "model_type": "idefics3",
        "image_token_id": 2,
        "scale_factor": 2,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 512,
        },
    }
    NATIVE = {
        "vision": "model.vision_model",
        "projector": "model.connector",
        "patch_embed": "model.vision_model.embeddings.patch_embedding",
        "layers": "model.vision_model.encoder.layers",
        "text": "model.text_model",
    }
    BLOCK = CLIP_BLOCK
    #: Four crops of the first and two of the second, with the whole of each.
    IMAGE_SIZES = ((60, 40), (60, 10))

    def processor(self, tokenizer):
        from transformers import Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        return Idefics3Processor(images, tokenizer, image_seq_len=4)

    def test_rows_are_crops(self):
        assert [len(self.everything(count)["grid"]) for count in (1, 2)] == [5, 8]

    def padded(self, frame, sizes):
        """An encoding of one prompt with images of ``sizes``, in pixels, each at the top left of a ``frame``."""
        generator = torch.Generator().manual_seed(2)
        pixels = torch.randn(1, len(sizes), 3, *frame, generator=generator)
        mask = torch.zeros(1, len(sizes), *frame, dtype=torch.long)
        for shown, (height, width) in zip(mask[0], sizes, strict=True):
            shown[:height, :width] = 1
        features = frame[0] * frame[1] // (self.model.vision.patch_size**2 * 4)
        ids = torch.tensor([[10, *[2] * features * len(sizes), 11]])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels * mask[:, :, None],
            "pixel_attention_mask": mask,
        }

    @pytest.mark.parametrize("sizes", [[(16, 16), (12, 8)], [(8, 16), (16, 4)], [(12, 8)]])
    def test_padding_is_left_out(self, sizes):
        """Patches lie where their pixels do, whether an image fills the frame, a side of it or neither."""
        vision, inputs = self.model.vision, self.padded((16, 16), sizes)
        with torch.no_grad(), self.model.trace(inputs):
            grid = vision.grid.save()
            maps = vision.patch_map(vision.patch_embeddings).save()
            seen = vision.layers[0].self_attn.attention_probabilities.mean(dim=(1, 2)).save()
            shown = vision.patch_map(seen).save()
        assert grid == [(height // 4, width // 4) for height, width in sizes]
        embed = self.bare.get_submodule(self.NATIVE["patch_embed"])
        for image, laid, (height, width) in zip(inputs["pixel_values"][0], maps, sizes, strict=True):
            assert_close(laid, self.embedded(embed, image[:, :height, :width]))
        for pattern, weight in zip(shown, seen, strict=True):
            assert_close(pattern.sum(), torch.ones(()))
            assert_close(pattern.sum(), weight.sum())

    def test_a_map_of_another_frame(self):
        vision = self.model.vision
        with mistake(ValueError, "patch_map", r"\(3, 2\)", r"\(1, 15, 8\)"):
            vision.patch_map(torch.zeros(1, 15, 8), [(3, 2)])  # here
        with mistake(ValueError, "patch_map"):
            vision.patch_map(torch.zeros(2, 16, 8), [(4, 4)])  # here


class TestSmolVLM(TestIdefics3):
    """The same sizes, and Idefics 3's processor: its own writes the same prompts, and wants a package for videos."""

    CONFIG = {
        **TestIdefics3.CONFIG,
        "model_type": "smolvlm",
        "vision_config": {**TestIdefics3.CONFIG["vision_config"], "model_type": "smolvlm_vision"},
    }

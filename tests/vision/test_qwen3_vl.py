"""Qwen3-VL: features that are added behind text blocks beside those that take the place of the tokens."""

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError

from nnterp import Unavailable
from nnterp.testing import mistake
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import moved
from nnterp.testing.oracles import Site, greedy
from nnterp.testing.qwen_tower import TEXT, TOKENS, TOWER, QwenSuite


class TestQwen3VL(QwenSuite):
    """Two inner blocks of the tower reach the text behind its first two; the third that is named does not exist."""

    FAMILY = "qwen3_vl_text"
    PROCESSOR = "Qwen3VLProcessor"
    CONFIG = {
        "model_type": "qwen3_vl",
        **TOKENS,
        "text_config": {"model_type": "qwen3_vl_text", **TEXT, "head_dim": 8},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            **TOWER,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2, 7],
        },
    }
    BLOCK = {**QwenSuite.BLOCK, "mlp.down_proj": "mlp.linear_fc2"}
    BETWEEN_FRAMES = (42,)
    FED = (0, 1)

    def deepstack(self, edits=None, count=1):
        """The bare model with what the tower's mergers give the text recorded, and edited."""
        mergers = self.bare.model.visual.deepstack_merger_list
        sites = {("merger", k): (mergers[k], Site("")) for k in self.FED}
        return self.bare_run(count, more=sites, edits=edits)

    @pytest.mark.parametrize("count", [1, 2])
    def test_deepstack(self, count):
        """What the mergers return is what the stream of the image tokens gains between two blocks, bit by bit."""
        model, bare = self.model, self.deepstack(count=count)
        with torch.no_grad(), model.trace(self.prompt(count), images=self.images(count)):
            read = [].save()
            mask = model.vision.image_token_mask.save()
            for k in self.FED:
                leaving = model.layers[k].layer_output.clone()
                added = model.layers[k].deepstack_output.clone()
                read.append((leaving, added, model.layers[k + 1].layer_input.clone()))
        for k, (leaving, added, entering) in enumerate(read):
            assert_same(added, bare["merger", k])
            assert_same(entering[mask], leaving[mask] + added)
            assert_same(entering[~mask], leaving[~mask])

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("layer", FED)
    def test_deepstack_written(self, layer, in_place):
        model, block = self.model, self.model.layers[layer]
        with torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            if in_place:
                block.deepstack_output[:] = moved(block.deepstack_output.clone())
            else:
                block.deepstack_output = moved(block.deepstack_output)
            logits = model.logits.save()
        bare = self.deepstack({("merger", layer): moved})
        assert_close(logits, bare.output.logits, ULPS_AFTER_MODEL)
        assert_differs(logits, self.everything()["logits"])

    def test_what_takes_the_image_out(self):
        """Neither the features set to zero nor what is added later, but both: another image then changes nothing."""
        model = self.model

        def answer(image, features, deepstack):
            with torch.no_grad(), model.trace(self.prompt(), images=[image]):
                if features:
                    model.vision.image_features[:] = 0
                for k in self.FED if deepstack else ():
                    model.layers[k].deepstack_output[:] = 0
                logits = model.logits.save()
            return logits

        (image,) = self.images()
        other = image.rotate(180)
        for features, deepstack in ((True, False), (False, True)):
            assert_differs(answer(other, features, deepstack), answer(image, features, deepstack))
        assert_same(answer(other, True, True), answer(image, True, True))

    def test_blocks_that_are_not_fed(self):
        block = self.model.layers[2]
        assert set(self.model.support()["deepstack_output"]) == {2}
        with mistake(Unavailable, "deepstack_output", "first 2 blocks"), self.model.trace(self.prompt(0)):
            block.deepstack_output.save()  # here
        self.runs()

    def test_deepstack_of_a_text(self):
        with mistake(OutOfOrderError, "deepstack_output", r"images=\[\.\.\.\]"), self.model.trace(self.prompt(0)):
            self.model.layers[1].deepstack_output.save()  # here
        self.runs()

    def test_deepstack_of_another_shape(self):
        model, block = self.model, self.model.layers[0]
        with mistake(ValueError, "deepstack_output", "image_tokens"), model.trace(self.prompt(), images=self.images()):
            block.deepstack_output = block.deepstack_output[1:]  # here
        self.runs()

    def test_deepstack_while_generating(self):
        """It is there at the step at which the image enters, and an edit of it reaches the next token too."""
        model = self.model
        with torch.no_grad(), model.generate(self.prompt(), images=self.images(), **greedy(2)) as tracer:
            last = [].save()
            for step in tracer.iter[:2]:
                if step == 0:
                    model.layers[1].deepstack_output[:] = 0
                last.append(model.logits[:, -1].clone())
        zero = self.bare.model.visual.deepstack_merger_list[1].register_forward_hook(lambda *call: call[-1] * 0)
        with torch.no_grad():
            bare = self.bare.generate(**self.inputs(), **greedy(2), return_dict_in_generate=True, output_logits=True)
        zero.remove()
        for got, expected in zip(last, bare.logits, strict=True):
            assert_close(got, expected, ULPS_AFTER_MODEL)

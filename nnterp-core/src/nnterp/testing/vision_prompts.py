"""What holds of a prompt with images, or without: how it is traced and generated from, and what is said of mistakes."""

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError

from nnterp.testing.comparing import assert_close, assert_same
from nnterp.testing.mistakes import mistake
from nnterp.testing.oracles import greedy
from nnterp.testing.vision_facts import VisionFacts


class VisionPrompts(VisionFacts):
    """The statements of `VisionSuite` about prompts and mistakes."""

    # -- prompts ------------------------------------------------------------------------------------------------------

    def test_text_alone(self):
        model = self.model
        ids = self.inputs(0)["input_ids"]
        with torch.no_grad(), model.trace(self.prompt(0)):
            mask = model.vision.image_token_mask.save()
            logits = model.logits.save()
        assert not mask.any()
        with torch.no_grad():
            assert_close(logits, self.bare(**self.inputs(0)).logits)
        assert mask.shape == ids.shape

    def test_prompts_of_other_lengths(self):
        """Two prompts with an image each, padded: every row is what its prompt gives alone."""
        model, images = self.model, self.images(2)
        prompts = [f"The quick {self.IMAGE} brown fox", f"A {self.IMAGE} dog"]
        with torch.no_grad(), model.trace(prompts, images=[[image] for image in images]):
            mask = model.vision.image_token_mask.save()
            features = model.vision.image_features.save()
            entering = model.layers[0].layer_input.save()
            last = model.logits[:, -1].save()
        if self.SCATTERED:
            assert_same(entering[mask], features)
        for row, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            with torch.no_grad(), model.trace(prompt, images=[image]):
                alone = model.logits[:, -1].save()
            self.assert_logits(last[row : row + 1], alone)

    def test_generate(self):
        model, steps = self.model, 3
        with torch.no_grad():
            expected = self.bare.generate(**self.inputs(), **greedy(steps))
            with model.generate(self.prompt(), images=self.images(), **greedy(steps)) as tracer:
                masks, last = [].save(), [].save()
                for _ in tracer.iter[:steps]:
                    masks.append(model.vision.image_token_mask.clone())
                    last.append(model.logits[:, -1].clone())
        assert [mask.any().item() for mask in masks] == [True] + [False] * (steps - 1)
        assert [mask.shape[1] for mask in masks[1:]] == [1] * (steps - 1)
        assert [tokens.argmax(-1).item() for tokens in last] == expected[0, -steps:].tolist()

    # -- mistakes -----------------------------------------------------------------------------------------------------

    def runs(self) -> None:
        """The model answers as before."""
        with torch.no_grad(), self.model.trace(self.prompt(), images=self.images()):
            logits = self.model.logits.save()
        assert_same(logits, self.everything()["logits"])

    def test_an_image_the_prompt_has_no_place_for(self):
        model = self.model
        with mistake(ValueError, "image"), model.trace("The quick brown fox", images=self.images()):  # here
            model.logits.save()
        self.runs()

    def test_two_invokes(self):
        model = self.model
        with mistake(ValueError, "one invoke"), model.trace() as tracer:  # here
            with tracer.invoke(self.prompt(), images=self.images()):
                model.logits.save()
            with tracer.invoke("The quick"):
                model.logits.save()
        self.runs()

    def test_an_image_beside_token_ids(self):
        model, ids = self.model, self.inputs(0)["input_ids"]
        with mistake(ValueError, "images=", "pixel_values"), model.trace(input_ids=ids, images=self.images()):  # here
            model.logits.save()
        self.runs()

    def test_a_message_without_its_image(self):
        model = self.model
        parts = [{"type": "image"}, {"type": "text", "text": "The quick"}]
        with mistake(ValueError, "image part"), model.trace([{"role": "user", "content": parts}]):  # here
            model.logits.save()
        self.runs()

    def test_messages_with_images_in_two_invokes(self):
        """What the tower makes of both images would be one tensor, in either invoke."""
        model = self.model
        one, other = ([{"role": "user", "content": [{"type": "image", "image": each}]}] for each in self.images(2))
        with mistake(ValueError, "one invoke"), model.trace() as tracer:  # here
            with tracer.invoke(one):
                model.vision.image_features[:] = 0
            with tracer.invoke(other):
                model.logits.save()
        self.runs()

    def test_a_place_in_a_message_without_an_image(self):
        model, message = self.model, {"role": "user", "content": self.prompt()}
        with mistake(ValueError, "in its text", "parts"), model.trace([message]):  # here
            model.logits.save()
        self.runs()

    def test_an_image_without_a_prompt(self):
        model = self.model
        with mistake(ValueError, "no prompt"), model.trace(images=self.images()):  # here
            model.logits.save()
        self.runs()

    def test_images_for_another_prompt(self):
        """As many places as images in all, and not for each prompt."""
        model, images = self.model, [[image] for image in self.images(2)]
        prompts = [self.prompt(2), "A dog"]
        with mistake(ValueError, r"\[2, 0\]", r"\[1, 1\]"), model.trace(prompts, images=images):  # here
            model.logits.save()
        self.runs()

    def test_a_place_without_an_image(self):
        model = self.model
        with mistake(ValueError, "image", r"images="), model.trace(self.prompt()):  # here
            model.logits.save()
        self.runs()

    def test_another_number_of_images(self):
        model = self.model
        with mistake(ValueError, "1", "2"), model.trace(self.prompt(2), images=self.images(1)):  # here
            model.logits.save()
        self.runs()

    @pytest.mark.parametrize("name", ["grid", "patch_embeddings", "tower_output", "image_features"])
    def test_an_image_value_without_an_image(self, name):
        model = self.model
        with mistake(OutOfOrderError, name, r"images=\[\.\.\.\]"), model.trace(self.prompt(0)):
            getattr(model.vision, name).save()  # here
        self.runs()

    def test_read_only(self):
        model = self.model
        with mistake(AttributeError, "image_token_mask", "input_ids"), model.trace(self.prompt(), images=self.images()):
            model.vision.image_token_mask = model.vision.image_token_mask  # here
        self.runs()

    def test_another_shape(self):
        model = self.model
        with mistake(ValueError, "image_features", "image_tokens"), model.trace(self.prompt(), images=self.images()):
            model.vision.image_features = model.vision.image_features[1:]  # here
        self.runs()

    def test_a_load_that_no_image_reaches(self):
        model = self.loaded.load(task="text-generation")
        assert not [row for row in model.support() if row.startswith("vision.")]
        with mistake(ValueError, "image-text-to-text"), model.trace(self.prompt(), images=self.images()):  # here
            model.logits.save()
        message = {"role": "user", "content": [{"type": "image", "image": self.images()[0]}]}
        with mistake(ValueError, "image-text-to-text"), model.trace([message]):  # here
            model.logits.save()
        if not self.TEXT_LOAD_HAS_TOWER:
            with mistake(ValueError, "pixel_values", "image-text-to-text"), model.trace(self.inputs()):  # here
                model.logits.save()
            with mistake(AttributeError, "vision", "image-text-to-text"):
                model.vision  # here # noqa: B018
            return
        assert model.vision.support() == {}
        with mistake(RuntimeError, "unavailable", "image-text-to-text"), model.trace("The quick"):
            model.vision.layers[0].layer_output.save()  # here

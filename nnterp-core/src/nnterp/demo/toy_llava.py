"""A LLaVA small enough to train while one waits: no package carries a trained model that sees.

A CLIP tower of two blocks, of which the projector reads the first, and a Llama of three. It is shown pieces of two
photographs with a coloured square pasted in, and learns to say the colour, or that there is none; in the same batches
it learns the made-up sentences of `nnterp.demo.toy`, so that the demo's text has an answer too.

The tower's attention adds nothing: its output projections are zero and stay so. A patch's feature then says what is in
that patch, and the text model has to look for the one with the square. Where the attention may learn, the tower spreads
the colour over all patches within hundreds of steps, and no place in it stands for the square any more.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnterp.checkpoints import FetchError, Report, cache_directory, written_whole
from nnterp.demo import pictures
from nnterp.demo.toy import repeated_words, sentence, text_stream, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE = "<image>"
PIXELS, PATCH = 64, 8
STEPS, PICTURES, TEXT_ROWS, REPEATED_ROWS, LEARNING_RATE = 400, 24, 8, 6, 1.5e-3
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def toy_llava(report: Report) -> Path:
    """The directory of the checkpoint, trained on first use and kept under `nnterp.checkpoints.cache_directory`.

    Raises FetchError where Pillow is not installed or the photographs cannot be fetched.
    """
    directory = cache_directory() / "toy-llava"
    if not directory.is_dir():
        with written_whole(directory) as target:
            model, processor = train(report)
            model.save_pretrained(target)
            processor.save_pretrained(target)
    return directory


def train(report: Report, steps: int = STEPS) -> tuple[Any, Any]:
    """Train the model from one fixed seed: the model and its processor."""
    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    spoken = [f"{pictures.QUESTION.strip()} {answer}." for answer in (*pictures.COLOURS, pictures.MISSING)]
    processor = processor_of(tokenizer_of([sentence(chance) for _ in range(3000)] + spoken * 20))
    try:
        photographs = pictures.photographs()
    except ImportError as error:
        raise FetchError("training toy-llava needs Pillow: pip install 'nnterp-core[demo]'") from error
    model = untrained(processor.tokenizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    written = text_stream(processor.tokenizer, chance)
    words = words_of(processor.tokenizer)
    report(f"training a LLaVA of {sum(p.numel() for p in model.parameters()) / 1e3:.0f} thousand parameters, once")
    for step in range(steps):
        shown = [pictures.random_picture(photographs, chance) for _ in range(PICTURES)]
        seen = model(**asked(processor, shown)).loss
        repeated = [repeated_words(words, generator) for _ in range(REPEATED_ROWS)]
        rows = [(row, row) for row in itertools.islice(written, TEXT_ROWS)]
        ids, labels = (torch.stack(each) for each in zip(*repeated, *rows, strict=True))
        read = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        (seen + read).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            report(f"step {step + 1} of {steps}: {seen.item():.2f} nats an answer, {read.item():.2f} a token of text")
    return model.eval(), processor


def untrained(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The ``LlavaForConditionalGeneration`` as training begins."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=PIXELS, patch_size=PATCH, projection_dim=64, **TOWER),
        text_config=LlamaConfig(vocab_size=len(tokenizer), **TEXT, **SPECIAL),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        **SPECIAL,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
    for block in model.model.vision_tower.encoder.layers:
        torch.nn.init.zeros_(block.self_attn.out_proj.weight)
        block.self_attn.requires_grad_(False)
    return model


def processor_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """A ``LlavaProcessor`` of the toy's tokenizer, with a token for images in it, and Pillow's image processor."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    images = CLIPImageProcessorPil(size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS})
    return LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def asked(processor: Any, shown: list[pictures.Picture]) -> dict[str, Tensor]:
    """What the model is called with for some pictures, and as labels the answer behind each question."""
    texts = [f"{IMAGE}{pictures.QUESTION} {each.answer}" for each in shown]
    inputs = dict(processor(text=texts, images=[each.image for each in shown], return_tensors="pt"))
    labels = inputs["input_ids"].clone()
    labels[:, :-1] = -100
    return {**inputs, "labels": labels}


def words_of(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The ids of the vocabulary's words of more than two letters, each with the space before it."""
    vocabulary = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([i for i, token in enumerate(vocabulary) if token.startswith("Ġ") and len(token) > 3])

"""An image tower: its blocks and sizes, what it makes of an image, and where that enters the text."""

from collections.abc import Sequence
from typing import Any

from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from nnsight.intervention.source import STATE
from torch import Tensor

from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import EProperty, Unavailable
from nnterp.components.locations import missed
from nnterp.components.standard import Standard, blocks_support, every_row
from nnterp.components.taps import HELPERS, argument, entering
from nnterp.components.vision.blocks import NO_PROCESSOR, OfTower, per_patch
from nnterp.components.vision.layouts import ImageFeatures, ImageTokenMask, Patches

#: Rows and columns of patches, one pair per image, in the order of the images.
Grid = list[tuple[int, int]]

#: The grids of a run's towers by path, one for each call, so that a value read later than the grid can be laid out.
GRIDS = "grids"


def note_grid(module: Any, grid: Sequence) -> Grid:
    """``grid`` as a list of pairs of ints, kept for the rest of the run that ``module`` takes part in."""
    pairs = [(int(rows), int(columns)) for rows, columns in grid]
    state = module.__dict__.get(STATE)
    interleaver, path, _ = state.active() if state is not None else (None, None, ())
    if interleaver is not None:
        interleaver.__dict__.setdefault(GRIDS, {}).setdefault(path, []).append(pairs)
    return pairs


HELPERS["__grid__"] = note_grid


def grid(pairs: str) -> dict[str, Any]:
    """`Vision.TAPS` of a tower whose grids are ``pairs``, an expression of its forward's arguments."""
    return {"grid": entering(f"__grid__(self, {pairs})")}


#: Of a tower called with images of one size.
OF_PIXELS = "[[side // self.config.patch_size for side in pixel_values.shape[-2:]]] * len(pixel_values)"


def _grid(vision: "Vision") -> Any:
    """Rows and columns of patches of each image, ``[(rows, columns), ...]``, in the order of the images.

    Of each crop or tile where the model cuts images into such. Read at any place of the trace from the tower on; of
    the tower's first call, where it has several (an image and a video in one prompt).
    """
    known, location = vision._grids(), f"{vision.path}.grid"
    if known:
        return known[0]
    try:
        return Mediator.value(location)
    except OutOfOrderError as error:  # the same one, by which nnsight knows the end of a loop over steps
        error.args = (missed(f"grid of {vision.path}", location, vision.ABSENT),)
        raise


def _image_token_mask(vision: "Vision") -> ImageTokenMask:
    """Which tokens of the prompt stand for a piece of an image, ``[batch, seq]``, True there.

    ``input_ids == image token``: on a decode step all False. Read it first of the image values.
    """
    return vision.root.input_ids == vision.image_token_id


def _last_of_the_tower(vision: "Vision") -> str:
    """Where the stream leaves the tower: its final norm, or the last block where it has none over the patches."""
    return f"{vision.NORM}.output" if vision.NORM else f"layers.{len(vision.layers) - 1}.output"


class ConvolvedPatches(EProperty):
    """Patches as a convolution makes them, ``[images, width, rows, columns]``, served in the tower's order: a view."""

    def _view(self, obj: Any, element: Any) -> Any:
        return EProperty._view(self, obj, element).flatten(2).transpose(1, 2)

    def _pack(self, obj: Any, raw: Any, value: Tensor) -> Any:
        return EProperty._pack(self, obj, raw, value.transpose(1, 2).reshape(raw.shape))


class Vision(OfTower):
    """``model.vision``: an image tower.

    Its blocks are ``layers``. What reaches the text model need not be `tower_output`: LLaVA-1.5 reads an inner block
    and leaves out the class token, Gemma 3 pools; ``projector.input`` is what the projector is called with.

    Attributes:
        FLAT: Whether the tower's tensors lack the axis of images, ``[patches, width]``: they are served with a first
            axis of 1.
        PACKED: Whether one row holds the patches of all images, one after the other.
        CLASS_TOKENS: Positions before the patches that are no patch.
        VARIABLE: Whether images keep their own resolution, so the tower has no `image_size`.
        NORM: The native name of the norm over the patches behind the last block, where the tower has one.
        layers, patch_embed: The blocks, the patch embedding.
    """

    ROLE = "tower"
    FLAT: bool = False
    PACKED: bool = False
    CLASS_TOKENS: int = 0
    VARIABLE: bool = False
    NORM: str | None = None
    TAPS = grid(OF_PIXELS)

    # -- availability -------------------------------------------------------------------------------------------------

    def no_images(self) -> str | None:
        """Why no image reaches the model this tower belongs to, or None: the one place that decides."""
        if self.root.__dict__.get("processor") is None:
            return NO_PROCESSOR
        if "projector" not in self.root._aliases:
            return "where images enter the text model is not known: nothing says which module is the projector"
        return None

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """Why each value is unavailable, or None: the tower's own and, by dotted name, those of its blocks.

        A block value is None where every block has it, else ``{layer: reason}``. With ``layer``, that block's values
        alone. Empty on a load that no image reaches (`no_images`).
        """
        if self.no_images():
            return {}
        if layer is not None:
            return every_row(self.layers)[range(self.num_layers)[layer]]
        return {**Standard.support(self), **blocks_support(self.layers)}

    @property
    def norm(self) -> Any:
        """The final norm over the patches; AttributeError on a tower that has none."""
        if self.NORM is None:
            raise AttributeError(f"{self.path} has no norm over the patches behind its last block")
        return getattr(self, self.NORM)

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Number of the tower's blocks."""
        return len(self.layers)

    @property
    def vision_hidden_size(self) -> int:
        """Width of the tower's stream, which is another than the text model's ``hidden_size``."""
        return self._module.config.hidden_size

    @property
    def num_heads(self) -> int:
        """Heads of the tower's attentions."""
        return self._module.config.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one head: the config's own where it says, else ``vision_hidden_size // num_heads``."""
        return getattr(self._module.config, "head_dim", None) or self.vision_hidden_size // self.num_heads

    @property
    def intermediate_size(self) -> int:
        """Width of the tower's MLPs."""
        return self._module.config.intermediate_size

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self._module.config.patch_size

    @property
    def image_size(self) -> int:
        """Side in pixels of the square images the tower takes; raises Unavailable on one that takes any size."""
        if self.VARIABLE:
            raise Unavailable(f"image_size of {self.path} is unavailable: the tower takes images of any resolution")
        return self._module.config.image_size

    @property
    def image_token_id(self) -> int:
        """The token that stands for a piece of an image in the prompt."""
        config = self.root._module.config
        token = getattr(config, "image_token_id", None)
        return config.image_token_index if token is None else token

    # -- values -------------------------------------------------------------------------------------------------------

    image_token_mask = DerivedEProperty(
        _image_token_mask, "Which tokens of the prompt stand for a piece of an image", instead="model.input_ids"
    )
    grid = DerivedEProperty(_grid, "Rows and columns of patches of each image")

    @ConvolvedPatches("patch_embed.output", description="The patch embedding's output, one row per patch")
    def patch_embeddings(self, value: Tensor) -> Patches:
        """The patch embedding's output, ``[images, patches, vision_hidden_size]``, in the tower's order of patches.

        Before positions, class token and the tower's own norms. In-place edits and assignment reach the tower.
        """
        return value

    @EProperty(_last_of_the_tower, description="The stream that leaves the tower, after its final norm")
    def tower_output(self, value: Tensor) -> Patches:
        """The stream leaving the last block, ``[images, patches, vision_hidden_size]``, after the tower's final norm
        where it has one over the patches.

        Before pooling, the loss of a class token, merging or an adapter. In-place edits and assignment reach what the
        model does with it, which is nothing where the projector reads another block.
        """
        return value

    tower_output = per_patch(tower_output)

    @EProperty(
        lambda vision: vision.features_at(),
        "The features that take the place of the image tokens",
        unavailable=lambda vision: vision.no_scatter(),
    )
    def image_features(self, value: Tensor) -> ImageFeatures:
        """What takes the place of the image tokens' embeddings, ``[image_tokens, hidden_size]``, in their order.

        ``layers[0].input[image_token_mask] == image_features``. In-place edits and assignment change those rows of the
        text model's stream and nothing else.
        """
        return value.view(-1, value.shape[-1])

    # -- patches on the image -----------------------------------------------------------------------------------------

    def _grids(self) -> list[Grid]:
        """The grids of the run that asks, one for each call of the tower so far; none outside a run."""
        if getattr(getcurrent(), "mediator", None) is None:
            return []
        return getattr(self.interleaver, GRIDS, {}).get(self.path, [])

    def _known_grid(self) -> Grid | None:
        """The grids of the run that asks, where the tower has run in it; ValueError where it has on several."""
        grids = self._grids()
        if any(each != grids[0] for each in grids):
            raise ValueError(
                f"patch_map of {self.path}: the tower ran {len(grids)} times in this trace, on patches that lie "
                f"differently: pass the grid of the call that the values are from, patch_map(values, grid)"
            )
        return grids[0] if grids else None

    def patch_map(self, values: Tensor, grid: Sequence[tuple[int, int]] | None = None) -> list[Tensor]:
        """Values per patch laid out as the patches lie on the images: ``[rows, columns, ...]`` for each image.

        Args:
            values: ``[images, patches, ...]`` in the tower's own order, of any of its values (``layer_output``,
                ``patch_embeddings``, a row of a pattern); a class token's and padding's are left out.
            grid: `grid` of the trace they are from. Known inside that trace, and on a tower that takes images of one
                size; elsewhere it has to be saved there and given here.

        Raises ValueError for another number of images or patches than the grid has.
        """
        grid = grid if grid is not None else self._known_grid() or self.usual_grid(values)
        if grid is None:
            raise ValueError(
                f"patch_map of {self.path}: how the patches of an image lie is not the same for all on this tower, and "
                f"not known outside the trace: save vision.grid in the trace and pass it, patch_map(values, grid)"
            )
        rows = self.rows_of_images(values, grid) if len(grid) and values.dim() > 1 else None
        if rows is None:
            raise ValueError(
                f"patch_map of {self.path} takes values [images, patches, ...] of as many images and patches as the "
                f"grids {list(grid)} have, not a tensor of shape {tuple(values.shape)}"
            )
        return [self.arranged(row, shape) for row, shape in zip(rows, grid, strict=True)]

    def usual_grid(self, values: Tensor) -> Grid | None:
        """The grids of ``values`` on a tower all of whose images have one; None where an image has its own."""
        if self.VARIABLE:
            return None
        side = self.image_size // self.patch_size
        return [(side, side)] * len(values)

    def rows_of_images(self, values: Tensor, grid: Sequence[tuple[int, int]]) -> list[Tensor] | None:
        """``values`` of each image, ``[patches, ...]``: its patches alone, in the tower's order.

        None where they are not those of ``grid``. The class token is not yet there in `patch_embeddings`.
        """
        counts = [rows * columns for rows, columns in grid]
        if self.PACKED:
            return list(values[0].split(counts)) if tuple(values.shape[:2]) == (1, sum(counts)) else None
        positions = values.shape[1]
        if len(values) != len(grid) or positions not in (counts[0], counts[0] + self.CLASS_TOKENS):
            return None
        return list(values[:, positions - counts[0] :]) if set(counts) == {counts[0]} else None

    def arranged(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """One image's ``values``, ``[patches, ...]`` in the tower's order, as ``[rows, columns, ...]``."""
        return values.unflatten(0, shape)

    # -- where the image enters the text ------------------------------------------------------------------------------

    def features_at(self) -> str:
        """The path from here to where the features are about to take the place of the image tokens."""
        if "_features_at" not in self.__dict__:
            host = next((each for each in self.root.modules() if isinstance(each, ImageScatter)), None)
            inside = "" if host is None else "/" + ".".join((*host.path.split(".")[1:], "image_features"))
            self.__dict__["_features_at"] = inside
        return self.__dict__["_features_at"]

    def no_scatter(self) -> str | None:
        """Why there is no place where features take that of tokens, or None."""
        return None if self.features_at() else "no module is known in which features take the place of image tokens"


class ImageScatter(Standard):
    """The module in whose forward image features take the place of the image tokens' embeddings.

    `image_features` of the tower is read and written there, in the call of ``masked_scatter``; a module that does it
    elsewhere says where with its own TAPS or METHODS.
    """

    TAPS = {"image_features": argument("masked_scatter", 1)}

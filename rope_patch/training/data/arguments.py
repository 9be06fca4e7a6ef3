"""Recipe keys for documents and their packing, and checks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rope_patch.training.data.aggregation import TASKS, check_aggregation
from rope_patch.training.data.documents import check_compression_ratio
from rope_patch.units import parse_tokens
from rope_patch.utils.errors import did_you_mean

PACKINGS = ("single", "concatenate", "masked", "best_fit", "best_fit_unmasked")
POSITIONS = ("consecutive", "skip", "leaky")
WITHOUT_MASKS = "packing single, concatenate or best_fit_unmasked, and short_share 0"


@dataclass
class DataArguments:
    """Recipe keys for the documents and for how they are packed into rows."""

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Long documents: files (.txt and .md: one each; .jsonl, .parquet), folders, "
            "globs, hub:NAME[,CONFIG][@SPLIT], novels:NAME."
        },
    )
    data_weights: list[float] | None = field(
        default=None, metadata={"help": "Each source's share of tokens; equal if left out."}
    )
    short_data: list[str] | None = field(
        default=None, metadata={"help": "Documents of the short rows; data if left out."}
    )
    short_share: float = field(
        default=0.0, metadata={"help": "Share of rows that are packed of short documents."}
    )
    short_length: int | None = field(
        default=None, metadata={"help": "Tokens of the longest of those; the trained length."}
    )
    packing: str = field(
        default="single",
        metadata={
            "help": "single: a row is a slice of one document; concatenate: documents one after "
            "another; masked: the same, each keeps to itself; best_fit: whole documents, chosen to "
            "fill the rows, each keeps to itself; best_fit_unmasked: the same, they see each other."
        },
    )
    packing_window: int = field(
        default=128,
        metadata={"help": "best_fit packs so many rows' worth of documents at a time."},
    )
    positions: str = field(
        default="consecutive",
        metadata={
            "help": "How rows shorter than the target length meet its distances. consecutive: not "
            "at all; skip: positions jump once in a row (PoSE); leaky: distances beyond a quarter "
            "of the row grow faster (Leaky ReRoPE's inverse)."
        },
    )
    min_document_length: int = field(
        default=0, metadata={"help": "Leave out documents of fewer tokens."}
    )
    compression_ratio: list[float] | None = field(
        default=None,
        metadata={
            "help": "Keep long documents whose size compressed by zlib / size is between two "
            "bounds, such as 0.3 0.6: repetition is below, noise above."
        },
    )
    aggregation_share: float = field(
        default=0.0,
        metadata={"help": "Share of long documents that get questions about them, with answers."},
    )
    aggregation_tasks: list[str] = field(
        default_factory=lambda: list(TASKS),
        metadata={
            "help": "Of what kinds. common_words: which are most common; extraction: the sentences "
            "that have a word; records: counts and neighbours of several words."
        },
    )
    text_column: str = field(
        default="text",
        metadata={"help": "Where records have their text, unless they have input_ids."},
    )
    shuffle_window: int = field(
        default=0, metadata={"help": "Shuffle documents among so many; 0 keeps their order."}
    )

    def __post_init__(self) -> None:
        """Turn a single source into a list, and texts such as `32k` into numbers."""
        self.data = [self.data] if isinstance(self.data, str) else self.data
        if isinstance(self.short_data, str):
            self.short_data = [self.short_data]
        for name in ("short_length", "min_document_length"):
            setattr(self, name, parse_tokens(name, getattr(self, name)))

    @property
    def is_best_fit(self) -> bool:
        """Return whether whole documents are chosen to fill the long rows."""
        return self.packing in ("best_fit", "best_fit_unmasked")

    def window_bytes(self, row_length: int) -> int:
        """Return the main memory in bytes that the documents of a packing window take.

        Documents with labels of their own take twice as much.
        """
        return 4 * self.packing_window * row_length if self.is_best_fit else 0

    @property
    def masks_documents(self) -> bool:
        """Return whether each document of a long row sees only itself."""
        return self.packing in ("masked", "best_fit")

    @property
    def needs_masks(self) -> bool:
        """Return whether any row needs a mask between documents."""
        return self.masks_documents or self.short_share > 0

    @property
    def joins_documents(self) -> bool:
        """Return whether tokens see across the borders of documents."""
        return self.packing in ("concatenate", "best_fit_unmasked")


def check_data_arguments(arguments: DataArguments, row_length: int) -> None:
    """Check what can be checked without reading.

    Raises:
        ValueError: Says which argument is wrong, and what it may be.
    """
    a = arguments
    for name, sources in (("data", a.data), ("short_data", a.short_data)):
        if sources is not None and not sources:
            raise ValueError(f"no documents: say {name}: a list of files, folders or novels:emma")
        if twice := sorted({s for s in sources or [] if (sources or []).count(s) > 1}):
            raise ValueError(f"{name} names {twice[0]!r} twice: say data_weights instead")
    if a.packing not in PACKINGS:
        hint = did_you_mean(a.packing, PACKINGS, 0.5)
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {a.packing!r}{hint}")
    if a.aggregation_share and a.joins_documents:
        raise ValueError(
            "aggregation_share asks about the text above a question, which would be that of other "
            f"documents, too: expected packing single, masked or best_fit, got {a.packing}"
        )
    if not 0 <= a.short_share < 1:
        raise ValueError(f"short_share must be at least 0 and below 1, got {a.short_share}")
    _check_positions(a)
    check_aggregation(a.aggregation_share, a.aggregation_tasks)
    check_compression_ratio(a.compression_ratio)
    if a.data_weights is not None and len(a.data_weights) != len(a.data):
        raise ValueError(
            f"expected a data_weights for each of {len(a.data)} sources in data, got "
            f"{len(a.data_weights)}"
        )
    if any(not 0 < weight < float("inf") for weight in a.data_weights or []):
        raise ValueError(f"data_weights must be above 0, got {a.data_weights}: leave a source out")
    if a.short_length is not None and not 0 < a.short_length <= row_length:
        raise ValueError(
            f"short_length must be 1 to {row_length}, the tokens of a row, got {a.short_length}"
        )
    if a.packing_window < 1:
        raise ValueError(f"packing_window must be at least 1 row, got {a.packing_window}")
    for name in ("min_document_length", "shuffle_window"):
        if getattr(a, name) < 0:
            raise ValueError(f"{name} must be at least 0, got {getattr(a, name)}")


def _check_positions(arguments: DataArguments) -> None:
    """Check the recipe's `positions` against its packing."""
    positions = arguments.positions
    if positions not in POSITIONS:
        raise ValueError(
            f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}"
            f"{did_you_mean(positions, POSITIONS, 0.5)}"
        )
    if positions != "consecutive" and arguments.needs_masks:
        raise ValueError(
            f"positions: {positions} takes a row as one text, in which nothing keeps to itself: "
            f"expected {WITHOUT_MASKS}, got packing {arguments.packing} and short_share "
            f"{arguments.short_share:g}"
        )


def ineffective_keys(arguments: DataArguments) -> set[str]:
    """Return the keys that have no effect on rows, and that earlier versions lacked.

    Without them a run of such a version has the same settings, and resumes.
    """
    keys = set()
    if arguments.positions == "consecutive":
        keys.add("positions")
    if not arguments.is_best_fit:
        keys.add("packing_window")
    if arguments.compression_ratio is None:
        keys.add("compression_ratio")
    if not arguments.aggregation_share:
        keys |= {"aggregation_share", "aggregation_tasks"}
    return keys


def require_no_document_masks(arguments: DataArguments) -> None:
    """Raise if rows need a mask between documents, which torch's context parallelism lacks.

    Raises:
        ValueError: Rows would need such a mask.
    """
    if arguments.needs_masks:
        raise ValueError(
            "documents packed in a row would see each other under torch's context parallelism, "
            f"which takes no mask: expected {WITHOUT_MASKS}, or sequence parallelism with flash "
            f"attention; got packing {arguments.packing} and short_share {arguments.short_share:g}"
        )

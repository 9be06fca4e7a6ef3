"""A catalogue of mended defects, by the part of the package that had them."""

from regressions import (
    checking,
    commands,
    evaluation,
    exporting,
    patching,
    pretrained,
    statistics,
    studies,
    tasks,
    training,
)

CATALOGUE = [
    *patching.DEFECTS,
    *pretrained.DEFECTS,
    *exporting.DEFECTS,
    *checking.DEFECTS,
    *evaluation.DEFECTS,
    *statistics.DEFECTS,
    *tasks.DEFECTS,
    *studies.DEFECTS,
    *training.DEFECTS,
    *commands.DEFECTS,
]

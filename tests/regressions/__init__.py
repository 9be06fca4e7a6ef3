"""A catalogue of mended defects, by the part of the package that had them."""

from regressions import (
    checking,
    commands,
    encodings,
    evaluation,
    exporting,
    lengths,
    methods,
    ops,
    patching,
    position_maps,
    pretrained,
    serving,
    statistics,
    studies,
    tasks,
    training,
)

CATALOGUE = [
    *patching.DEFECTS,
    *position_maps.DEFECTS,
    *lengths.DEFECTS,
    *encodings.DEFECTS,
    *ops.DEFECTS,
    *methods.DEFECTS,
    *serving.DEFECTS,
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

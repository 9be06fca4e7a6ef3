"""Write reaction SMILES of textbook reactions on common building blocks, any number of them.

RXNMapper's model reads reactions, and its package has a dozen. These are ten reaction types of
every textbook (amide coupling, esterification, saponification, Williamson ether synthesis, Suzuki
coupling, reductive amination, Boc deprotection, nitro reduction, sulfonamide formation, ketone
reduction), each with usual reagents, on groups written such that joined strings are the product.
"""

from __future__ import annotations

import random
from itertools import product

# Groups that end with the atom that binds, and groups that begin with it.
_ALKYL_END = ("CC", "CCC", "CC(C)", "C1CC1", "COCC", "N#CC", "C=CC", "CC(C)CC", "FC(F)(F)C")
_ARYL_END = (
    "c1ccccc1",
    "Cc1ccccc1",
    "COc1ccccc1",
    "Fc1ccccc1",
    "Clc1ccccc1",
    "N#Cc1ccccc1",
    "c1ccncc1",
    "c1ccoc1",
    "c1ccsc1",
)
_ALKYL_START = ("CC", "CCC", "CC(C)C", "C1CCCC1", "CCOC", "Cc1ccccc1", "CC#C", "C1CCOCC1")
_ARYL_START = (
    "c1ccccc1",
    "c1ccc(C)cc1",
    "c1ccc(OC)cc1",
    "c1ccc(F)cc1",
    "c1cccc(Cl)c1",
    "c1ccc(C(C)=O)cc1",
    "c1ccc(C(F)(F)F)cc1",
    "c1cccnc1",
    "c1ccc2ccccc2c1",
)
_END, _START = _ALKYL_END + _ARYL_END, _ALKYL_START + _ARYL_START
_TYPES = (
    (_END, _START, "{a}C(=O)O.N{b}.CCN(CC)CC.CN(C)C=O>>{a}C(=O)N{b}"),
    (_END, _ALKYL_START, "{a}C(=O)O.O{b}.O=S(=O)(O)O>>{a}C(=O)O{b}"),
    (_END, _ALKYL_START, "{a}C(=O)O{b}.CCO.O.[Na+].[OH-]>>{a}C(=O)O"),
    (_ALKYL_END, _ARYL_START, "{a}CBr.O{b}.CN(C)C=O.O=C([O-])[O-].[K+].[K+]>>{a}CO{b}"),
    (_ARYL_END, _ARYL_START, "{a}Br.OB(O){b}.C1COCCO1.O.O=C([O-])[O-].[Na+].[Na+]>>{a}-{b}"),
    (_END, _START, "{a}C=O.N{b}.CO.[BH4-].[Na+]>>{a}CN{b}"),
    (_ALKYL_END, _ARYL_START, "{a}N(C(=O)OC(C)(C)C){b}.C1COCCO1.Cl>>{a}N{b}"),
    (("",), _ARYL_START, "O=[N+]([O-]){b}.CO.[H][H].[Pd]>>N{b}"),
    (_ARYL_END, _START, "{a}S(=O)(=O)Cl.N{b}.ClCCl.c1ccncc1>>{a}S(=O)(=O)N{b}"),
    (_END, _ARYL_START, "{a}C(=O){b}.CO.[BH4-].[Na+]>>{a}C(O){b}"),
)


def reactions(seed: int) -> list[str]:
    """Return over a thousand distinct reactions, in an order of their own for each seed."""
    found = {
        pattern.format(a=a, b=b)
        for ends, starts, pattern in _TYPES
        for a, b in product(ends, starts)
    }
    shuffled = sorted(found)
    random.Random(seed).shuffle(shuffled)
    return shuffled

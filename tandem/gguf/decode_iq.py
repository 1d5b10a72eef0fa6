"""Blocks of the codebook formats (IQ1 to IQ4) to float32, as in decode.py.

An index names a point of a codebook: 8 (or 4) small numbers. A codebook is a chosen set of points of the
lattice levels ** width, in the lattice's order (first coordinate fastest): a bitmap of the lattice holds it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np

from tandem.gguf.decode import half, planes, scaled
from tandem.kernels.kernel import Array
from tandem.kernels.panels import IQ4_VALUES

_CODEBOOKS = {  # levels, bitmap of the lattice
    "IQ1_S": (
        (-1, 0, 1),
        "c-k#eO>0z16uqyx#k83y_qA0qE*kA7fk#%6iL;cd<W&+S(JE7AEBc6nlGQ*KX*Z#@1057+gows$6w-}Cbfte_m;o2UY|_#*VZa~"
        "*x^U%6T=`Mm&aUdhx#ygF&eKOplgaU0)cQ?aLaWb`!=%}lC@i-gZEZ5CFdhU_><`D{U2pdIZAiiRBZ^Tjpc--1mjt-&r-O_l7bZ"
        "y)3*%3zRUeyRXfJ~s5?<5PM<UK4aB<I3L}>n{hnc{+>K$G67mn>zvR$=UOtZPa7LUsmQWQ2bN)ou!Kj_yfb~LQyR=nku)`P+=g="
        "?+GNRyF#AueD^;Yg67k)HG=(os>Uh!rG~(gRxZza2HhyPsM)=qh9|ehXUldkU;_wA!C+2Fv`rcq!34!0Fqz%0;&7#XeAmBu`}t6"
        "ci#>+3WlSwzITy{$0C$RU8lhlWkibbyz6nxOL=l|4%yAAJ4G^LV^S*V!(*CwdNU%)Qrh$#q9cyW*tq|@QQ}j896#XTv`6q5lhc&"
        "*LLPVeEGcad$xT4&D*b^FV9bJ+^}ih*A`2jX2rIue$9q9{)`S!jt!g=X1D{vGEMnukjj}Wcvs!oqc~_d61@aP1V3Bvcjc9uWpgt"
        "6=l#-;vm1GpU-HX*>(|GJ!F2C{R9{8qA7trFiLFJ0VD+S2Ny_0+jiaiUvPbU!Gt<44HyL$nQ%A{iI)xZW(;0iU=zRoe)YSg8LFF"
        "!L&Ei&Q)FngSxd==b)ez8IIEAq?gCPR1z1`cE#svx$dBcgrdMr~`+vY{G*{j)LdH7J(;|V_S3+rEqj0{aUGZ~5`z3=#nUT2ypkI"
        "bf^7Qd%#dKF#22&cWI$B=(k{y*i-P-%7a6aqltG8tC11XWn$8wuQe)#`Rb$ezM@h+=MX6ehv4>@KW-1MD8)wE",
    ),
    "IQ2_XXS": (
        (8, 25, 43),
        "c-nPRORj`4470MbdWwiuj~R8vF<3s$DPNNQV8mEdDvh1mfzMz4@MsNM4-kL~Dg?0u3Z<Q}s#5&i%a^YL7=qILyw)W4Cso8iRnlp"
        "CLd`c4Du;C<RlH?aajd+e<FY7)k8>WSTt@47wX1jPqB41q=2e+&9hy;#r#nzQ(d`wV2I-N(E<X_7hks$x7)Do8!;TEvZcdv+$;B"
        "f*s-;99+U-&7)=?KnsoS&M%ZZjW8ztGaG<oin^)>q~!#84@<5Q?C;cAe-jqH$lW6s<jvF<nQc*Z$~yKl@H%B$)D{-`Y{-_v~Aze"
        "0c0{sHUUCpi",
    ),
    "IQ2_XS": (
        (8, 25, 43),
        "c-mc2ORj`4470L|dWwh@;*?QWh*MOoP)|Aew9xme83;|{*iP^L>UVu^J$f&9<)%0;rYcZH@zkTcz*1-`0#F4vd)cqIa~EY0S(m3"
        "6us~sl4e+uqnt+xnD5p1ifdk&k2^cqyDKl&hVwLuN#<u{Y#82-D2r2AS*#~B;6>b%zZ?$An2Qav5OyP;?IjC1*OUa>YNXBOJs!l"
        "*N%2M9ag1pZ#qbS<pDODX)Ys@FiGwcn?g7z}ZUJ85J?WuXe7)kq!xj_MC=sehbo`f6hw91-EjVApg;SBK(#S-ctqy5bslAAu_xa"
        "BeODLPcR%XL4jpOCvsj1dP@iIwgyVBr<uBI!nKMuUZZ1qQNNP<bV}FGN4KvRv{ky>(2~*Gt;x6q$P={6Cb#@3Dfxx_wWh`vWo0U"
        "*P",
    ),
    "IQ2_S": (
        (8, 25, 43),
        "c-n1JOKt@r42!agI0c#&;*=39#3>LflvCCTO#7-9jpk=;Y=fB%TefG%OIlXuE_Fz<Ougf=%xu>+l3Bq8hyjg~lMrunmZ<Wy`~YG"
        "iEi#3On5vBd<vmKZSi%aW(psKWGWlAsphF>8rUC+;ZDfa(=s@_F#i0yss$-8fvv#Vf@jNV{kuiVLgA~66J1A2@4RVJKUxH}IH-$"
        "JpaZ^g})pmKjjd>lmojtPqGOJ!xqXVV(I)s3f1HneH&<4|id_Zsqi~d9|fZw$~1nHWO$bgs-@JBFei6qb36Asxo<#s4;BRhd~d<"
        "sfnbhG0<$t^)oE$@gK%zO1xyELVB%s1k`FAKZeJ@WjCtPZ6s4%XC=!ChZ<C{I5t%jB|RQ$q0^0H^%ZVVCdNfJ9HPfzZdmWSrg_I"
        "({bPgptf%^rJMcpz`hTS7u<>s9rVvW-WSa`T|j+oGk",
    ),
    "IQ3_XXS": (
        (4, 12, 20, 28, 36, 44, 52, 62),
        "c-l=-K?=h#3{ye}VW$qZd!FLL9+1HvWO^EVh1sdkoaHp#R7#szmgHo6m{j1}>~2z^o7e*jro|>W6f;suxGq5ThwwrH-tdy3S=*8"
        "VCKknJ;ww~xN=C-Lt2kc1f`n?I#<sN&{qc;xi`rsIog^>xCi>0vO72GEj+P?`#G30*;dkafo0(MD70~26E5oy)Fh-PS2J_iYxE!"
        "Gh>5A3e2Aw8l#Lz*UZ2xyz&!sE!Xy7=t?heopubnm$;UMyR4j1Wf!f;*xLWT6+u!rw*Hy!tqyDZ17JdzPtf@!~_J7yrh&WtZi",
    ),
    "IQ3_S": (
        (1, 3, 5, 7, 9, 11, 13, 15),
        "c-k#dK}rKb5Ud?m7(7iN59ovqtiR~U2pdlmS^v`sIn3TR;sZue5Z@6$Amj-`@D=vV+J}a&>aMEU{rNq)_mDQ1)6rXa`g-zl6)-x"
        "V9&D<-%sLtw(&E+K!8jAZAn=FIh`{BX?s3iZ9eL!0y{saQwa{i<M_rV8i?Gza!ZNf5Tx$=B>&%}&x2aFnb2>I1DZfG3@eJJ?w}H"
        "f9jj>U<u}qaX$V(Q{%bJZi0qBwX8+P2=0D&xpG^*kpx3aC_+^woo1gDy;frCMb5s>PfCelExhl@Z5=M_J&lZwQK<TIaOt1Nd_t_"
        "Z4Nkqr(Irw~QLK*sjOloy2EUU#sN3YKfvLC9pG+yhGG#kO><KBF1{I~{B$E!8AqIlE}-BNQAl`R33C|JNFjj93D(#a!oZudm_a("
        "c~OHe<Yb)Y4R?AVbTWv01QA~hX",
    ),
}

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = 1 - 2 * _BITS.astype(np.float32)  # [byte, 8]: a set bit is a minus
# [7-bit index, 8]: the eighth sign is not stored; it makes the number of minuses even.
_EVEN_SIGNS = _SIGNS[np.arange(128) + 128 * (_BITS[:128].sum(axis=1, dtype=np.int64) % 2)]
_FOUR_BIT_LEVELS = np.array(IQ4_VALUES, np.float32)
_DELTA = np.float32(0.125)  # IQ1 shifts its points by this, up or down


@cache
def _codebook(name: str) -> Array:
    """Returns the points of a codebook: float32 [points, width]."""
    levels, packed = _CODEBOOKS[name]
    width = 8 if len(levels) == 3 else 4
    bitmap = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    chosen = np.flatnonzero(np.unpackbits(bitmap))
    digits = chosen[:, None] // len(levels) ** np.arange(width) % len(levels)
    points: Array = np.array(levels, np.float32)[digits]
    return points


def _points(name: str, index: Array, signs: Array) -> Array:
    """Points with their signs: [n, 256]; `signs` is [..., 8]."""
    points = _codebook(name)[index].reshape(len(index), 256)
    points *= signs.reshape(len(index), 256)
    return points


def _seven_bit_signs(words: Array) -> Array:
    """Unpacks four sign indices from the low 28 bits of each 32-bit word."""
    index = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    signs: Array = _EVEN_SIGNS[index]
    return signs


def _top_scale(words: Array) -> Array:
    """Returns the top four bits of each word, plus a half."""
    return (words >> np.uint32(28)).astype(np.float32) + np.float32(0.5)


def iq2_xxs(blocks: Array) -> Array:
    index = blocks[:, 2:].reshape(len(blocks), 8, 8)[:, :, :4]
    words = blocks[:, 2:].view("<u4")[:, 1::2]
    scale = half(blocks, 0) * _top_scale(words) * np.float32(0.25)
    return scaled(_points("IQ2_XXS", index, _seven_bit_signs(words)), scale)


def iq2_xs(blocks: Array) -> Array:
    words = blocks[:, 2:66].view("<u2")
    scale = half(blocks, 0) * (planes(blocks[:, 66:], 4, 1) + np.float32(0.5)) * np.float32(0.25)
    return scaled(_points("IQ2_XS", words & 511, _EVEN_SIGNS[words >> 9]), scale)


def iq2_s(blocks: Array) -> Array:
    index = blocks[:, 2:34] | planes(blocks[:, 66:74], 2, 1).astype(np.uint16) << 8
    scale = half(blocks, 0) * (planes(blocks[:, 74:], 4, 1) + np.float32(0.5)) * np.float32(0.25)
    return scaled(_points("IQ2_S", index, _SIGNS[blocks[:, 34:66]]), scale)


def iq3_xxs(blocks: Array) -> Array:
    words = blocks[:, 66:].view("<u4")
    scale = half(blocks, 0) * _top_scale(words) * np.float32(0.5)
    return scaled(_points("IQ3_XXS", blocks[:, 2:66], _seven_bit_signs(words)), scale)


def iq3_s(blocks: Array) -> Array:
    index = blocks[:, 2:66] | planes(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    scale = half(blocks, 0) * (2 * planes(blocks[:, 106:], 4, 1) + np.float32(1))
    return scaled(_points("IQ3_S", index, _SIGNS[blocks[:, 74:106]]), scale)


def _shifted_points(index: Array, down: Array) -> Array:
    """Points of IQ1 moved by the delta, down where `down` (one for each index) is set: [n, 256]."""
    return (_codebook("IQ1_S")[index] + np.where(down, -_DELTA, _DELTA)[:, :, None]).reshape(len(index), 256)


def iq1_s(blocks: Array) -> Array:
    # For each 32 values: four times 3 bits of index, 3 bits of scale, the sign of the delta.
    words = blocks[:, 34:].view("<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), 32)
    values = _shifted_points(blocks[:, 2:34] | high << 8, np.repeat(words >> 15, 4, axis=1))
    return scaled(values, half(blocks, 0) * (2 * (words >> 12 & 7) + 1))


def iq1_m(blocks: Array) -> Array:
    # Four times 3 bits of scale; the top four bits are a quarter of the block's half.
    words = blocks[:, 48:].view("<u2")
    quarters = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view("<f2").astype(np.float32)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), 16)
    high = planes(blocks[:, 32:48], 4, 1)  # 3 bits of index, the delta's sign
    values = _shifted_points(blocks[:, :32] | (high & 7).astype(np.uint16) << 8, high >> 3)
    return scaled(values, scale * (2 * scales + 1))


def iq4_nl(blocks: Array) -> Array:
    return scaled(_FOUR_BIT_LEVELS[planes(blocks[:, 2:], 4, 16)], half(blocks, 0))


def iq4_xs(blocks: Array) -> Array:
    scales = planes(blocks[:, 4:8], 4, 1) | planes(blocks[:, 2:4], 2, 1) << np.uint8(4)
    scale = half(blocks, 0) * (scales - np.float32(32))
    return scaled(_FOUR_BIT_LEVELS[planes(blocks[:, 8:], 4, 16)], scale)


DECODERS: dict[str, Callable[[Array], Array]] = {
    decoder.__name__.upper(): decoder
    for decoder in (iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq4_nl, iq4_xs)
}

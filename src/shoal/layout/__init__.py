"""WHERE every byte lies. Parameters and a world size enter; a packing and parcels leave.

Pure arithmetic on the shapes and dtypes of parameters that are communicated together: nothing
here communicates, every rank computes the same answer alone, and no answer walks the ranks.

Glossary:

    axis       a direction of the mesh; a *dim* is one of a tensor
    parameter  name, shape and dtype (`ParamSpec`); its index is its place in the sequence given
    layout     a policy for cutting parameters: `Even`, `Flat`, `Rows`, `Block`, `Whole`
    packing    a layout applied to parameters and a world size (`Packing`)
    shard      one rank's buffer; all ranks' shards have the same size
    gathered   the buffer an all-gather makes of the shards, rank after rank
    region     a rectangle of a parameter: offsets and sizes along each dim (`Region`)
    piece      what one rank holds of one parameter: regions, and where they start (`Piece`)
    quantum    the elements that stay together where a parameter is cut: one, a row, a block
    gap        the rest of a shard in which a quantum did not fit
    zero-copy  said of a parameter that lies in one run of the gathered buffer, so a view serves
    stripe     equal pieces on consecutive ranks, copied in one strided operation (`Stripe`)
    holding    whatever can say which rank holds which region (`Holding`)
    parcel     a region on its way from a rank of one holding to a rank of another (`Parcel`)

Two float32 parameters, w of shape (10, 4) and b of shape (10,), on two ranks. Numbers outside of
brackets are bytes of the shard, those inside are rows; dots are padding:

    Even()    rank 0  |0 w[0:5] 80|....|128 b[0:5] 148|....|192
              rank 1  |0 w[5:10] 80|....|128 b[5:10] 148|....|192

    Rows()    rank 0  |0 w[0:8] 128|
              rank 1  |0 w[8:10] 32|....|64 b[0:10] 104|....|128

    Whole()   rank 0  |0 w[0:10] 160|....|192
              rank 1  |0 b[0:10] 40|....|192

Under `Rows`, w is the first 160 bytes of the gathered buffer and b its bytes 192 to 232: both
are zero-copy. Tensors in such buffers are the business of `shoal.layout.buffer`.
"""

from shoal.layout.packing import Packing
from shoal.layout.parcel import Holding, Parcel, incoming, outgoing
from shoal.layout.piece import Piece
from shoal.layout.policy import Block, Even, Flat, Layout, Rows, Whole
from shoal.layout.region import Region
from shoal.layout.spec import ParamSpec

__all__ = [
    "Block",
    "Even",
    "Flat",
    "Holding",
    "Layout",
    "Packing",
    "ParamSpec",
    "Parcel",
    "Piece",
    "Region",
    "Rows",
    "Whole",
    "incoming",
    "outgoing",
]

"""The numbers at which a choice changes, each with its reason; `forced` sets others for a while."""

# -- the kernels in Gluon (on Hopper, for Triton from 3.6 on)
CHUNK = 64  # tokens: theirs alone
COLUMNS = 64  # values of a program: a product of fewer rows would leave tensor cores idle
HEAD = 128  # keys, and values, of all but the first two
HEADS = (64, 128)  # keys of intra_chunk and of the scan of the forward pass
# tokens times heads: with fewer a call waits for the host with either kernel, and a first call,
# which has its descriptors to make, for longer with that in Gluon. Where the last bits are others,
# tokens of a sequence, not of the batch
ENOUGH = 1 << 14
# the same where multiprocessors have several programs, and plain Triton has them work side by side
CROWDED, LONG = 1 << 18, 256  # and tokens of a sequence: a few chunks do not pay the way in

# the newest Triton with which both kernels of intra_chunk in Gluon give the same bits for 128 keys
# of several value heads; with 3.9 they were seen not to
SHARED_RING = (3, 7)

# -- what the fused stages hold
FUSED = 128  # keys, and values
SSD_STATES, SSD_HEAD = 128, 64  # N and P of Mamba-2: one tile
SSD_CHUNK = 128  # tokens
SSD_PIECE = 4096  # tokens of a program of ssd_fwd
# the same where a sequence of more tokens than that has this many or fewer: pieces of 4096 of 80
# heads are then 320 programs at most, of which a GPU of 132 multiprocessors runs 264 at a time
SSD_SHORT, SSD_LONG = 2048, 16384
# pieces of a sequence over ranks, where every piece has a map anyway; and the least of a piece. Of
# lengths that they divide, the backward pass finds its pieces without a table
SSD_PIECES, SSD_LEAST = 8, 512
SSD_FEW, SSD_MANY = 16, 80  # heads of a program: of dx, and where sums over heads are kept

# -- long sequences of few heads are cut
PROGRAMS = 16  # of a scan, heads times tiles of 64 values: with more, maps cost more than they gain
LENGTH = 2048  # tokens of a piece by maps
LEAST = 4  # pieces of a sequence that is cut
FULL = 128  # programs: a sequence that makes more fills a GPU
PER_PROGRAM = 128  # tokens of a piece by warm-up for each program of a sequence
MULTIPROCESSORS = 64  # at least, where sequences are cut

# -- groups of heads, one after the other
# tokens times heads of a group, whose states take 128 MiB: less would not be worth launches
HEAD_GROUP = 1 << 18

# -- tokens of a chunk
# generation -> bytes of an element -> BK -> the longest chunk whose tiles fit shared memory and
# registers; 64 where nothing is said. Turing has no tensor cores in Triton, and its products
# keep whole operands in registers; fp32 products split each operand in three (tf32x3).
CHUNK_LIMITS = {
    "turing": {2: {128: 32, 256: 16}, 4: {128: 16, 256: 16}},
    "ampere": {4: {128: 32, 256: 16}},
    "hopper": {4: {128: 64, 256: 32}},
}

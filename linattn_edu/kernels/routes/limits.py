"""The numbers at which a choice changes, each with its reason; `forced` sets others for a while."""

# -- the kernels in Gluon (on Hopper, for Triton from 3.6 on)
CHUNK = 64  # tokens: theirs alone
COLUMNS = 64  # values of a program: a product of fewer rows would leave tensor cores idle
HEAD = 128  # keys, and values, of all but these
HEADS = (64, 128)  # keys of both stages of the forward pass and of intra_chunk_bwd
# tokens times heads: with fewer a call waits for the host with either kernel, and a first call,
# which has its descriptors to make, for longer with that in Gluon. Where the last bits are others,
# tokens of a sequence, not of the batch
ENOUGH = 1 << 14
# the same where multiprocessors have several programs, and plain Triton has them work side by side
CROWDED, LONG = 1 << 18, 256  # and tokens of a sequence: a few chunks do not pay the way in

# one kernel for scan_bwd and intra_chunk_bwd, whose program takes all values of a head and fills a
# multiprocessor: at least so much of them is to have work
BUSY = 0.85
ONE_KERNEL = (3, 9)  # and the newest Triton with which it was seen to give the bits of two
ONE_FORWARD = (3, 9)  # that of intra_chunk and scan

# the newest Triton with which these kernels in Gluon were run: kda_prepare, and Mamba-2's
KDA_FRONT = SSD_GLUON = (3, 9)

# the newest Triton with which both kernels of intra_chunk in Gluon give the same bits for 128 keys
# of several value heads; with 3.9 they were seen not to
SHARED_RING = (3, 7)

# -- what the fused stages hold
FUSED = 128  # keys, and values
DPLR = 256  # keys of the general delta rule in chunks
SSD_STATES, SSD_HEAD = 128, 64  # N and P of Mamba-2: one tile
SSD_CHUNK = 128  # tokens
SSD_PIECE = 4096  # tokens of the longest sequence that ssd_fwd does not cut
# programs of ssd_fwd that a GPU of 132 multiprocessors runs at a time, and how many of them are to
# have work to the end: a piece of a sequence and head is a program
SSD_PROGRAMS, SSD_BUSY = 264, 0.9
SSD_LEAST = 512  # tokens of a piece: multiples of that
SSD_MOST = 64  # pieces: the last begins with what all of them leave
# pieces of the backward scans over ranks; of lengths that they divide, no table says where they are
SSD_PIECES = 8
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

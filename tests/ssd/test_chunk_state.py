"""Stage chunk_state: kernel against reference."""

import stages

test_kernel = stages.matches("chunk_state", "ssd")

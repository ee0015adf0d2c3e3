"""Stage chunk_scan: kernel against reference."""

import stages

test_kernel = stages.matches("chunk_scan", "ssd")

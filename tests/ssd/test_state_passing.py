"""Stage state_passing: kernel against reference."""

import stages

test_kernel = stages.matches("state_passing", "ssd")

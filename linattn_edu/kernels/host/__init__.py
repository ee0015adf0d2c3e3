"""What surrounds launches: compiling ahead, calls written down."""

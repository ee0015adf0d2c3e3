"""Reference stages of Mamba-2 (SSD), one file a stage."""

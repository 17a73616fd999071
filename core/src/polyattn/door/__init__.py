"""The records behind `polyattn.vendor`, one file a subject; standard library only."""

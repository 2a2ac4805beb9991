from pathlib import Path
def bin_directory() -> Path | None:
    c = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return c[-1].parent if c else None

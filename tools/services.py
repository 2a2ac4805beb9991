import sys
from pathlib import Path
from devservices.packages import install
install(Path(__file__).resolve())

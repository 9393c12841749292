"""``python -m flashmoe_science`` is the command ``flashmoe``."""

from flashmoe_science.cli.main import main

main()

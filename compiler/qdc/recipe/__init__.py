"""Recipe text to a checked recipe.

pydantic looks through every installed package for plugins that change how models are read. A recipe must mean the
same everywhere, and looking takes longer than reading one, so there are none.
"""

import os

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

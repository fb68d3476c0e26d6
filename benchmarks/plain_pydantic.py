"""What a project writes that has the models and nothing else: safe_load, validate, print. A peer of `qdc validate`."""

import sys

import yaml
from pydantic import ValidationError

from qdc.recipe.model import Recipe

try:
    with open(sys.argv[1], encoding="utf-8") as file:
        Recipe.model_validate(yaml.safe_load(file))
except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
    print(error)
    sys.exit(1)
print("ok")

"""What a recipe will cost and give, before anything runs: parameters, image size, memory, roofline, hours.

Pure functions of a resolved recipe, of what its checkpoints' headers say and of tables. Knows no rule and no verb.
"""

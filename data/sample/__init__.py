"""The bundled dialogues: written by a seeded generator, judged by a gold scorer, small enough to learn in minutes."""

"""The `drivetrain` command: one file per verb or small group of verbs, each with its `ARGUMENTS` and a function per verb.

`verbs` holds the list of them and turns what they raise into exit statuses; `targets` finds experiments, `runs` finds runs, `output`
prints tables or JSON. Nothing here is loaded by `import drivetrain`, and no torch by `drivetrain --help`.
"""

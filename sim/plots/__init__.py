"""Charts, drawn from result files only: nothing here knows the simulation.

`results` reads a folder, `table` says what is drawn over what, `series`, `curves`, `bars`, `grids`
and `pareto` draw one kind of chart each, `figures` chooses among them, `style` saves.
"""

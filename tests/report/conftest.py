"""Reports without the seconds that their figures take."""

import pytest

from dflash_mcmc.report import figure


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures are made, but neither laid out nor drawn: their files show nothing."""
    from matplotlib.figure import Figure

    def save(drawn, folder, name, formats=()):
        files = [folder / f"{name}.{form}" for form in ("png", "svg", *formats)]
        return {file for file in files if file.write_text('<svg width="1pt" height="1pt" viewBox="0 0 1 1"></svg>')}

    monkeypatch.setattr(figure, "save", save)
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda drawn: None)

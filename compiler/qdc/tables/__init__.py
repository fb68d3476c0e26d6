"""Facts about engines, their patches and cards, as data with a source per cell."""

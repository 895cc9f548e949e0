TEXT = "from the layer"

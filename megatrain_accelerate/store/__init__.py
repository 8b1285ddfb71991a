"""Host memory: the home of weights, master residuals, moments and gradients."""

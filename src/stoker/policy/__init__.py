"""Cache policies: who stays, as regions with an order, an admission rule and a pop rule."""

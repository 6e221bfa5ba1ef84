# SPDX-License-Identifier: Apache-2.0
"""Offline tools: encode a checkpoint, profile residuals, evaluate quality. Never runs in serving."""

//! Steps of a layer, from one attention to the next.

use super::executor::{ActivationBuffer, StepExecutor};
use super::{RotaryTable, Token, Transformer};
use crate::engine::cpu::kernel::{Finish, Norm, Normalize, NormalizeInto, PrepareHeads, Scale};
use crate::engine::cpu::linear::LinearId;
use crate::engine::cpu::matrix::Window;
use crate::engine::cpu::profile::ComputeStage;
use crate::model::Placement;

/// Read-only inputs of the steps of a batch.
pub(super) struct LayerContext<'a> {
    pub(super) transformer: &'a Transformer,
    pub(super) tokens: &'a [Token],
    pub(super) positions: &'a [u32],
    pub(super) rotary_tables: &'a [RotaryTable],
}

impl LayerContext<'_> {
    /// Computes the steps from tokens to the first attention.
    pub(super) fn begin(&self, executor: &mut impl StepExecutor) {
        executor.rows(ComputeStage::Embedding, None, ActivationBuffer::States, |_, out| self.embed(out));
        self.project(executor, 0);
    }

    /// Computes the steps from the attention of this layer to that of the next one, or to the end.
    pub(super) fn follow(&self, executor: &mut impl StepExecutor, index: usize) {
        let weights = &self.transformer.weights;
        let layer = &weights.layers[index];
        self.join(executor, ActivationBuffer::Attended, layer.output, layer.after_attention.as_ref());
        let from = self.normed(executor, layer.before_feed_forward.as_ref());
        let feed_forward = &self.transformer.architecture.feed_forward;
        let finish = match feed_forward.gated {
            true => Finish::Gate(feed_forward.activation),
            false => Finish::Activate(feed_forward.activation),
        };
        executor.product(from, layer.expand, finish, ActivationBuffer::Expanded);
        self.join(executor, ActivationBuffer::Expanded, layer.contract, layer.after_feed_forward.as_ref());
        if index + 1 < weights.layers.len() {
            self.project(executor, index + 1);
        } else if let Some(norm) = &weights.final_norm {
            self.normalize(executor, norm, ActivationBuffer::States);
        }
    }

    /// Computes queries, keys and values of this layer.
    fn project(&self, executor: &mut impl StepExecutor, index: usize) {
        let Transformer { isa, architecture, weights, .. } = self.transformer;
        let layer = &weights.layers[index];
        let from = self.normed(executor, layer.before_attention.as_ref());
        executor.product(from, layer.project, Finish::Store, ActivationBuffer::Projections);
        let rotation = architecture.layers[index].rope.map(|rope| &self.rotary_tables[rope]);
        let norms = [layer.query_norm.as_ref(), layer.key_norm.as_ref()];
        if rotation.is_none() && norms.iter().all(Option::is_none) {
            return;
        }
        let attention = &architecture.attention;
        executor.rows(ComputeStage::Norm, None, ActivationBuffer::Projections, |_, rows| {
            isa.run(PrepareHeads {
                head_width: attention.head_width,
                heads: [attention.heads, attention.key_value_heads],
                norms,
                rotation,
                positions: &self.positions[rows.rows()],
                rows,
            });
        });
    }

    /// Returns the states, normalized if there is a normalization.
    fn normed(&self, executor: &mut impl StepExecutor, norm: Option<&Norm>) -> ActivationBuffer {
        let Some(norm) = norm else { return ActivationBuffer::States };
        executor.rows(
            ComputeStage::Norm,
            Some(ActivationBuffer::States),
            ActivationBuffer::Normed,
            |input, out| {
                let input = input.expect("rows to normalise");
                self.transformer.isa.run(NormalizeInto { norm, input, add: false, out });
            },
        );
        ActivationBuffer::Normed
    }

    /// Adds the result of a block to the states (residual connection).
    fn join(
        &self,
        executor: &mut impl StepExecutor,
        from: ActivationBuffer,
        linear: LinearId,
        norm: Option<&Norm>,
    ) {
        match (self.transformer.architecture.placement, norm) {
            (Placement::Post, Some(norm)) => {
                executor.product(from, linear, Finish::Add, ActivationBuffer::States);
                self.normalize(executor, norm, ActivationBuffer::States);
            }
            (Placement::Sandwich, Some(norm)) => {
                executor.product(from, linear, Finish::Store, ActivationBuffer::Normed);
                executor.rows(
                    ComputeStage::Norm,
                    Some(ActivationBuffer::Normed),
                    ActivationBuffer::States,
                    |input, out| {
                        let input = input.expect("rows to add");
                        self.transformer.isa.run(NormalizeInto { norm, input, add: true, out });
                    },
                );
            }
            (Placement::Pre, _) | (Placement::Post | Placement::Sandwich, None) => {
                executor.product(from, linear, Finish::Add, ActivationBuffer::States);
            }
        }
    }

    fn normalize(&self, executor: &mut impl StepExecutor, norm: &Norm, buffer: ActivationBuffer) {
        executor.rows(ComputeStage::Norm, None, buffer, |_, rows| {
            self.transformer.isa.run(Normalize { norm, rows })
        });
    }

    fn embed(&self, out: &mut Window<'_>) {
        let Transformer { isa, architecture, weights, .. } = self.transformer;
        let scale = architecture.embedding.scale;
        for (index, token) in self.tokens[out.rows()].iter().enumerate() {
            let row = out.row_mut(index);
            weights.words.row(token.id as usize).copy_to(row);
            if scale != 1.0 {
                isa.run(Scale { factor: scale, numbers: row });
            }
            if let Some(types) = &weights.types {
                types.row(token.kind as usize).add_to(row);
            }
            if let Some(positions) = &weights.positions {
                positions.row(token.position).add_to(row);
            }
        }
        if let Some(norm) = &weights.embedding_norm {
            isa.run(Normalize { norm, rows: out });
        }
    }
}

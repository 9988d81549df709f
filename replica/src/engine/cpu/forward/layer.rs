//! Steps of a layer, from one attention to the next.

use super::ways::{Place, Way};
use super::{Rotation, Token, Transformer};
use crate::engine::cpu::kernel::{Finish, Norm, Normalize, NormalizeInto, PrepareHeads, Scale};
use crate::engine::cpu::laps::Stage;
use crate::engine::cpu::linear::LinearId;
use crate::engine::cpu::matrix::Window;
use crate::model::Placement;

/// Read-only inputs of the steps of a batch.
pub(super) struct Step<'a> {
    pub(super) transformer: &'a Transformer,
    pub(super) tokens: &'a [Token],
    pub(super) positions: &'a [u32],
    pub(super) rotations: &'a [Rotation],
}

impl Step<'_> {
    /// Computes the steps from tokens to the first attention.
    pub(super) fn begin(&self, way: &mut impl Way) {
        way.rows(Stage::Embedding, None, Place::States, |_, out| self.embed(out));
        self.project(way, 0);
    }

    /// Computes the steps from the attention of this layer to that of the next one, or to the end.
    pub(super) fn follow(&self, way: &mut impl Way, index: usize) {
        let weights = &self.transformer.weights;
        let layer = &weights.layers[index];
        self.join(way, Place::Attended, layer.output, layer.after_attention.as_ref());
        let from = self.normed(way, layer.before_feed_forward.as_ref());
        let feed_forward = &self.transformer.architecture.feed_forward;
        let finish = match feed_forward.gated {
            true => Finish::Gate(feed_forward.activation),
            false => Finish::Activate(feed_forward.activation),
        };
        way.product(from, layer.expand, finish, Place::Expanded);
        self.join(way, Place::Expanded, layer.contract, layer.after_feed_forward.as_ref());
        if index + 1 < weights.layers.len() {
            self.project(way, index + 1);
        } else if let Some(norm) = &weights.final_norm {
            self.normalize(way, norm, Place::States);
        }
    }

    /// Computes queries, keys and values of this layer.
    fn project(&self, way: &mut impl Way, index: usize) {
        let Transformer { isa, architecture, weights, .. } = self.transformer;
        let layer = &weights.layers[index];
        let from = self.normed(way, layer.before_attention.as_ref());
        way.product(from, layer.project, Finish::Store, Place::Projections);
        let rotation = architecture.layers[index].rope.map(|rope| &self.rotations[rope]);
        let norms = [layer.query_norm.as_ref(), layer.key_norm.as_ref()];
        if rotation.is_none() && norms.iter().all(Option::is_none) {
            return;
        }
        let attention = &architecture.attention;
        way.rows(Stage::Norm, None, Place::Projections, |_, rows| {
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
    fn normed(&self, way: &mut impl Way, norm: Option<&Norm>) -> Place {
        let Some(norm) = norm else { return Place::States };
        way.rows(Stage::Norm, Some(Place::States), Place::Normed, |input, out| {
            let input = input.expect("rows to normalise");
            self.transformer.isa.run(NormalizeInto { norm, input, add: false, out });
        });
        Place::Normed
    }

    /// Adds the result of a block to the states (residual connection).
    fn join(&self, way: &mut impl Way, from: Place, linear: LinearId, norm: Option<&Norm>) {
        match (self.transformer.architecture.placement, norm) {
            (Placement::Post, Some(norm)) => {
                way.product(from, linear, Finish::Add, Place::States);
                self.normalize(way, norm, Place::States);
            }
            (Placement::Sandwich, Some(norm)) => {
                way.product(from, linear, Finish::Store, Place::Normed);
                way.rows(Stage::Norm, Some(Place::Normed), Place::States, |input, out| {
                    let input = input.expect("rows to add");
                    self.transformer.isa.run(NormalizeInto { norm, input, add: true, out });
                });
            }
            (Placement::Pre, _) | (Placement::Post | Placement::Sandwich, None) => {
                way.product(from, linear, Finish::Add, Place::States);
            }
        }
    }

    fn normalize(&self, way: &mut impl Way, norm: &Norm, place: Place) {
        way.rows(Stage::Norm, None, place, |_, rows| self.transformer.isa.run(Normalize { norm, rows }));
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

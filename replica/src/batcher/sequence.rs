//! Identity of an input for the planner and the cache.
//!
//! Two inputs are equal if everything that decides their rows is equal: the tenant, the requested output, the token ids
//! and their types. (The model and its precision are the same for all inputs of a process; the cache adds them itself.)
//! The planner compares the fields directly; different texts differ within their first tokens. The cache, if there is
//! one, stores a SHA-256 of them instead, so that two inputs with the same key cannot be constructed; computing it
//! takes some microseconds, and only with a cache.
//!
//! The tenant is included because sharing is observable by timing: a tenant that receives its response too early would
//! learn that another tenant has just sent the same input.

use std::cmp::Ordering;

use replica_core::batch::BatchInput;
use sha2::{Digest, Sha256};

use crate::engine::Output;
use crate::tokenize::Tokenized;

/// Tenant of a request, as a hash of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantKey([u8; 32]);

impl TenantKey {
    /// Returns the key of a tenant.
    pub fn new(name: impl AsRef<[u8]>) -> TenantKey {
        TenantKey(Sha256::digest(name).into())
    }
}

/// SHA-256 of everything that decides the rows of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SequenceKey(pub(crate) [u8; 32]);

/// One input of a request.
#[derive(Debug)]
pub(super) struct QueuedSequence {
    pub(super) tokens: Tokenized,
    pub(super) output: Output,
    tenant: Option<TenantKey>,
    /// Key in the cache, if there is one.
    pub(super) key: Option<SequenceKey>,
}

impl QueuedSequence {
    pub(super) fn new(
        tokens: Tokenized,
        output: Output,
        tenant: Option<TenantKey>,
        cached: bool,
    ) -> QueuedSequence {
        let mut sequence = QueuedSequence { tokens, output, tenant, key: None };
        sequence.key = cached.then(|| sequence.digest());
        sequence
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        self.tokens.ids.len()
    }

    /// Returns the number of rows of its output.
    pub(super) fn rows(&self) -> usize {
        match self.output {
            Output::Pooled => 1,
            Output::Tokens => self.len(),
        }
    }
}

impl QueuedSequence {
    /// Returns everything that decides the rows, as a comparable tuple.
    fn parts(&self) -> (u8, Option<&TenantKey>, &[u32], Option<&[u32]>) {
        let QueuedSequence { tokens: Tokenized { ids, types }, output, tenant, key: _ } = self;
        let output = match output {
            Output::Pooled => 0,
            Output::Tokens => 1,
        };
        (output, tenant.as_ref(), ids, types.as_deref())
    }

    fn digest(&self) -> SequenceKey {
        let (output, tenant, ids, types) = self.parts();
        // Every part has a fixed length or is preceded by its length, so different inputs never hash the same bytes.
        let mut digest = Sha256::new();
        digest.update([output, u8::from(tenant.is_some()), u8::from(types.is_some())]);
        digest.update(tenant.map_or([0; 32], |tenant| tenant.0));
        digest.update((ids.len() as u64).to_le_bytes());
        for part in [Some(ids), types].into_iter().flatten() {
            let bytes: Vec<u8> = part.iter().flat_map(|id| id.to_le_bytes()).collect();
            digest.update(bytes);
        }
        SequenceKey(digest.finalize().into())
    }
}

impl BatchInput for QueuedSequence {
    type Class = Output;

    fn tokens(&self) -> u64 {
        self.len() as u64
    }

    fn class(&self) -> Output {
        self.output
    }
}

impl Ord for QueuedSequence {
    fn cmp(&self, other: &QueuedSequence) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

impl PartialOrd for QueuedSequence {
    fn partial_cmp(&self, other: &QueuedSequence) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for QueuedSequence {
    fn eq(&self, other: &QueuedSequence) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for QueuedSequence {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_with_different_rows_have_different_keys() {
        let of = |ids: &[u32], types: Option<&[u32]>, output: Output, tenant: Option<&str>| {
            let tokens = Tokenized { ids: ids.into(), types: types.map(Into::into) };
            QueuedSequence::new(tokens, output, tenant.map(TenantKey::new), true)
        };
        let different = [
            of(&[1, 2], None, Output::Pooled, None),
            of(&[2, 1], None, Output::Pooled, None),
            of(&[1], None, Output::Pooled, None),
            of(&[1, 2, 0, 1], None, Output::Pooled, None),
            of(&[1, 2], Some(&[0, 1]), Output::Pooled, None),
            of(&[1, 2], Some(&[1, 1]), Output::Pooled, None),
            of(&[1, 2], None, Output::Tokens, None),
            of(&[1, 2], None, Output::Pooled, Some("a")),
            of(&[1, 2], None, Output::Pooled, Some("b")),
        ];
        for (i, a) in different.iter().enumerate() {
            for (j, b) in different.iter().enumerate() {
                assert_eq!(a == b, i == j, "{i} and {j}");
                assert_eq!(a.cmp(b), b.cmp(a).reverse(), "{i} and {j}");
                assert_eq!(a.key == b.key, i == j, "the keys of {i} and {j}");
            }
        }
        let again = of(&[1, 2], None, Output::Pooled, Some("a"));
        assert_eq!((&again, again.key), (&different[7], different[7].key));
    }
}

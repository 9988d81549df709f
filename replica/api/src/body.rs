//! Fields of a request body, declared once for the parser and for the API documentation.
//!
//! Unknown fields are ignored, as by the servers whose clients are supported. A field that *would change the result*
//! and is not supported is different: ignoring it would return a result that the caller did not request. Each body
//! therefore lists such fields beside those that it reads, and a request with one of them is rejected by name, unless
//! its value changes nothing. A field is either read, rejected, or without influence on the result; tests compare the
//! declared fields with `openapi.json`.

use super::fields;
use crate::refusal::Refusal;
use serde_json::value::RawValue;

/// Field that an operation reads.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: FieldKind,
    /// Description for the API documentation.
    pub description: &'static str,
}

/// Type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// A string.
    Text,
    /// `true` or `false`.
    Flag,
    /// A positive integer.
    Count,
    /// An integer, which may be 0 or negative.
    Integer,
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// A list of these texts.
    ListOf(&'static [&'static str]),
    /// A list of texts.
    Texts,
    /// A text or a list of texts.
    TextOrTexts,
    /// A text, a list of texts, a list of token ids, or a list of such lists.
    Inputs,
    /// As `Inputs`; a text may also be an object with `text`.
    InputsOrObjects,
    /// A list of texts, or of objects with `text`.
    Documents,
    /// A text, a pair of texts, or a list of lists of one or two texts.
    TextsOrPairs,
    /// A list of token ids, or a list of such lists.
    TokenIds,
    /// An object with `source_sentence` and `sentences`.
    Sentences,
    /// `true`, `false`, or one of these texts.
    FlagOr(&'static [&'static str]),
    /// An object, described in the description.
    Object,
    /// A list of objects, described in the description.
    Objects,
    /// Any value; it is ignored.
    Anything,
}

/// Field that would change the result and is not supported.
#[derive(Clone, Copy, Debug)]
pub struct RejectedField {
    /// Name.
    pub name: &'static str,
    /// Values, as JSON, that change nothing and are therefore accepted.
    pub neutral: &'static [&'static str],
    /// Supported alternative.
    pub instead: &'static str,
}

/// Fields of one body.
#[derive(Clone, Copy, Debug)]
pub struct BodySchema {
    /// Fields that are read.
    pub fields: &'static [Field],
    /// Fields that are rejected.
    pub rejected: &'static [RejectedField],
    /// Fields without which the request is rejected.
    pub required: &'static [&'static str],
}

/// Rejects `given` unless it is absent or one of the `neutral` values.
pub(super) fn reject(rejected: &RejectedField, given: Option<&RawValue>) -> Result<(), Refusal> {
    let RejectedField { name, neutral, instead } = *rejected;
    match given {
        Some(given) if !neutral.iter().any(|neutral| fields::same_json(neutral, given)) => {
            Err(Refusal::invalid(name, name, "would change the result and is not supported here", instead))
        }
        Some(_) | None => Ok(()),
    }
}

/// Raw fields of a body.
pub(super) trait RawBody<'a>: serde::Deserialize<'a> {
    /// Returns the body, or an error for the first unsupported field.
    fn checked(self) -> Result<Self, Refusal>;

    /// Parses the fields of `body`.
    fn read(body: &'a [u8]) -> Result<Self, Refusal> {
        fields::split::<Self>(body)?.checked()
    }
}

/// Declares a body: a struct of raw fields with its schema, and a parser that rejects unsupported fields.
macro_rules! body {
    (
        $(#[$attribute:meta])*
        $name:ident requires [$($required:literal),*] {
            $($(#[doc = $description:literal])+ $field:ident: $kind:expr,)+
        } rejects {
            $($rejected:ident $([$($neutral:literal),+])? => $instead:literal,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Default, serde::Deserialize)]
        struct $name<'a> {
            $(#[serde(borrow)] $field: Option<&'a serde_json::value::RawValue>,)+
            $(#[serde(borrow)] $rejected: Option<&'a serde_json::value::RawValue>,)*
        }

        impl<'a> $name<'a> {
            /// Schema of this body.
            const SCHEMA: crate::body::BodySchema = crate::body::BodySchema {
                fields: &[$(crate::body::Field {
                    name: stringify!($field),
                    kind: $kind,
                    description: concat!($($description),+),
                },)+],
                rejected: &[$(crate::body::RejectedField {
                    name: stringify!($rejected),
                    neutral: &[$($($neutral),+)?],
                    instead: $instead,
                },)*],
                required: &[$($required),*],
            };
        }

        impl<'a> crate::body::RawBody<'a> for $name<'a> {
            fn checked(self) -> Result<$name<'a>, crate::refusal::Refusal> {
                let given: &[Option<&serde_json::value::RawValue>] = &[$(self.$rejected,)*];
                for (rejected, given) in Self::SCHEMA.rejected.iter().zip(given) {
                    crate::body::reject(rejected, *given)?;
                }
                Ok(self)
            }
        }
    };
}

pub(super) use body;

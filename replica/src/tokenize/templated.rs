//! Tokens of a pair that a chat template formats as one text.
//!
//! The rendered text is tokenized as a whole and without special tokens around it, so that token boundaries between the
//! template and the texts are the same as in training. If the result is too long, tokens of the document are removed,
//! and, if that is not sufficient, tokens of the query; never those of the template, because the model generates its
//! answer after the template's end. The positions of query and document are found by rendering again with placeholders;
//! this is done only for pairs that must be cut.
//!
//! sentence-transformers cuts off the end and then overwrites the last tokens with the template's end. The result is
//! the same for templates whose document comes last; for others it loses the query, and this implementation does not.

use std::ops::Range;

use replica_api::input::{InvalidInput, OverlongPolicy, TruncationSide};

use super::text::Problem;
use super::{EncodeOptions, TextTokenizer, Tokenized};
use crate::model::PairTemplate;

/// Bytes of a query that are tokenized for each token of the model's limit, if the query must be cut. The query is
/// tokenized again with each document, and a query of megabytes would be so a thousand times. Languages have 3 to 5
/// bytes per token.
const QUERY_BYTES_PER_TOKEN: usize = 16;

impl TextTokenizer {
    /// Checks that the model's limit has room for a pair of texts within its template.
    pub(super) fn check_template(&self) -> Result<(), String> {
        let Some(template) = &self.template else { return Ok(()) };
        let rendered = template.render("a", "b")?;
        let tokens = self.tokenizer.encode_fast(rendered, false).map_err(|error| error.to_string())?.len();
        let most = self.readable.max_input_tokens;
        if tokens <= most {
            return Ok(());
        }
        Err(format!(
            "the chat template makes {tokens} tokens of the shortest pair, but the model reads at most {most}; raise \
             `max_seq_length` or `model_max_length` of the model, or build its engine for longer sequences"
        ))
    }

    /// Tokenizes a query and a document.
    pub(super) fn encode_templated(
        &self,
        template: &PairTemplate,
        query: &str,
        document: &str,
        options: &EncodeOptions,
    ) -> Result<Tokenized, Problem> {
        let query = self.bounded_query(query, options.overlong)?;
        let rendered = template.render(query, document).map_err(Problem::Template)?;
        if options.most.is_none() {
            let encoding = self.tokenizer.encode_fast(rendered.as_str(), false)?;
            let fits = encoding.len() <= self.readable.max_input_tokens;
            if fits || options.overlong == OverlongPolicy::Reject {
                return Ok(Tokenized { ids: encoding.get_ids().into(), types: None });
            }
        }
        let encoding = self.tokenizer.encode(rendered.as_str(), false)?;
        let places = template.places(query, document, &rendered).map_err(Problem::Template)?;
        let [query, document] = places.map(|place| tokens_within(encoding.get_offsets(), &place));
        let of_template = encoding.len() - query.len() - document.len();
        let lengths = [query.len(), document.len().min(options.most.unwrap_or(usize::MAX))];
        let ([of_query, of_document], side) = match options.overlong {
            OverlongPolicy::Reject => (lengths, TruncationSide::Right),
            OverlongPolicy::Truncate(cut) => {
                let available = self.readable.max_input_tokens.saturating_sub(of_template);
                (cut.pair.shares(lengths, available), cut.side)
            }
        };
        // The limit for documents always cuts the end, whichever end the pair's limit cuts.
        let beginning = document.start..document.start + lengths[1];
        let keeps =
            [(query.clone(), kept(query, of_query, side)), (document, kept(beginning, of_document, side))];
        let stays = |at: usize| keeps.iter().all(|(all, kept)| !all.contains(&at) || kept.contains(&at));
        let ids = encoding.get_ids().iter().enumerate().filter(|(at, _)| stays(*at));
        Ok(Tokenized { ids: ids.map(|(_, id)| *id).collect(), types: None })
    }

    /// Returns the query, or the part of it that can fit.
    fn bounded_query<'a>(&self, query: &'a str, overlong: OverlongPolicy) -> Result<&'a str, Problem> {
        let limit = self.readable.max_input_tokens;
        let most = limit.saturating_mul(QUERY_BYTES_PER_TOKEN);
        if query.len() <= most {
            return Ok(query);
        }
        let side = match overlong {
            OverlongPolicy::Reject => TruncationSide::Right,
            OverlongPolicy::Truncate(cut) => cut.side,
        };
        let part = match side {
            TruncationSide::Right => &query[..query.floor_char_boundary(most)],
            TruncationSide::Left => &query[query.ceil_char_boundary(query.len() - most)..],
        };
        if overlong != OverlongPolicy::Reject {
            return Ok(part);
        }
        // Nothing may be cut: either this part alone is too long, or the whole query is tokenized.
        let given = self.tokenizer.encode_fast(part, false)?.len();
        if given > limit {
            Err(Problem::Unreadable(InvalidInput::TooLong { limit, given }))
        } else {
            Ok(query)
        }
    }
}

/// Returns the range of consecutive tokens that lie within these bytes.
fn tokens_within(offsets: &[(usize, usize)], place: &Range<usize>) -> Range<usize> {
    let start = offsets.partition_point(|(start, _)| *start < place.start);
    let end = offsets.partition_point(|(_, end)| *end <= place.end);
    start..end.max(start)
}

/// Returns `count` tokens of the range, at most its length.
fn kept(tokens: Range<usize>, count: usize, side: TruncationSide) -> Range<usize> {
    match side {
        TruncationSide::Right => tokens.start..tokens.start + count,
        TruncationSide::Left => tokens.end - count..tokens.end,
    }
}

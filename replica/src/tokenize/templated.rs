//! The tokens of a pair that a chat template makes one text of.
//!
//! What the template writes is tokenised whole and without special tokens around it, so that words meet the template's
//! own as they did in training. Where it is too long, tokens of the document are taken out and, as far as that does not
//! do, tokens of the query: never those of the template, whose end is what the model answers. Where they stand is seen by
//! rendering once more with something else in their place, so it is asked only of a pair that is to be cut.
//!
//! sentence-transformers cuts the end off and writes the template's end over what is left. Of a template whose document
//! comes last that is the same; of others it loses the query, and this does not.

use std::ops::Range;

use replica_core::input::{InvalidInput, OverlongPolicy, TruncationSide};

use super::text::Problem;
use super::{Reading, TextTokenizer, Tokenized};
use crate::model::PairTemplate;

/// Of a query that is to be cut so many bytes are looked at for each token that the model reads. With each document the
/// query is tokenised again, and one of megabytes would be so a thousand times. Languages have 3 to 5 bytes in a token.
const QUERY_BYTES_PER_TOKEN: usize = 16;

impl TextTokenizer {
    /// Whether the model has room for a pair of texts beside its template.
    pub(super) fn check_template(&self) -> Result<(), String> {
        let Some(template) = &self.template else { return Ok(()) };
        let rendered = template.render("a", "b")?;
        let tokens = self.tokenizer.encode_fast(rendered, false).map_err(|error| error.to_string())?.len();
        let most = self.readable.max_input_tokens;
        if tokens <= most {
            return Ok(());
        }
        Err(format!(
            "the chat template makes {tokens} tokens of the shortest pair, and this model reads {most}: raise \
             `max_seq_length` or `model_max_length` of the model, or build its engine for longer sequences"
        ))
    }

    /// The tokens of a query and a document.
    pub(super) fn encode_templated(
        &self,
        template: &PairTemplate,
        query: &str,
        document: &str,
        reading: &Reading,
    ) -> Result<Tokenized, Problem> {
        let query = self.bounded(query, reading.overlong)?;
        let rendered = template.render(query, document).map_err(Problem::Template)?;
        if reading.most.is_none() {
            let encoding = self.tokenizer.encode_fast(rendered.as_str(), false)?;
            let fits = encoding.len() <= self.readable.max_input_tokens;
            if fits || reading.overlong == OverlongPolicy::Reject {
                return Ok(Tokenized { ids: encoding.get_ids().into(), types: None });
            }
        }
        let encoding = self.tokenizer.encode(rendered.as_str(), false)?;
        let places = template.places(query, document, &rendered).map_err(Problem::Template)?;
        let [query, document] = places.map(|place| tokens_within(encoding.get_offsets(), &place));
        let of_template = encoding.len() - query.len() - document.len();
        let lengths = [query.len(), document.len().min(reading.most.unwrap_or(usize::MAX))];
        let ([of_query, of_document], side) = match reading.overlong {
            OverlongPolicy::Reject => (lengths, TruncationSide::Right),
            OverlongPolicy::Truncate(cut) => {
                let room = self.readable.max_input_tokens.saturating_sub(of_template);
                (cut.pair.shares(lengths, room), cut.side)
            }
        };
        // To so many tokens a document is cut at its end, whichever end a pair loses.
        let beginning = document.start..document.start + lengths[1];
        let keeps =
            [(query.clone(), kept(query, of_query, side)), (document, kept(beginning, of_document, side))];
        let stays = |at: usize| keeps.iter().all(|(all, kept)| !all.contains(&at) || kept.contains(&at));
        let ids = encoding.get_ids().iter().enumerate().filter(|(at, _)| stays(*at));
        Ok(Tokenized { ids: ids.map(|(_, id)| *id).collect(), types: None })
    }

    /// The query, or what is looked at of it.
    fn bounded<'a>(&self, query: &'a str, overlong: OverlongPolicy) -> Result<&'a str, Problem> {
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
        // Nothing is cut that was not to be: either this much is too long, or all of it is read.
        let given = self.tokenizer.encode_fast(part, false)?.len();
        if given > limit {
            Err(Problem::Unreadable(InvalidInput::TooLong { limit, given }))
        } else {
            Ok(query)
        }
    }
}

/// The tokens that lie in these bytes, of tokens that follow each other.
fn tokens_within(offsets: &[(usize, usize)], place: &Range<usize>) -> Range<usize> {
    let start = offsets.partition_point(|(start, _)| *start < place.start);
    let end = offsets.partition_point(|(_, end)| *end <= place.end);
    start..end.max(start)
}

/// So many of them, which are no more than there are.
fn kept(tokens: Range<usize>, count: usize, side: TruncationSide) -> Range<usize> {
    match side {
        TruncationSide::Right => tokens.start..tokens.start + count,
        TruncationSide::Left => tokens.end - count..tokens.end,
    }
}

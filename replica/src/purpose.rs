//! What the model is for, and what may be asked of it.
//!
//! A path asks for something that a model does or does not do; which of the two is decided here and nowhere else, so
//! that each refusal says what the model is. A model that embeds ranks too: by the similarity of two vectors.

use std::sync::Arc;

use replica_core::input::OverlongPolicy;
use replica_core::prompt::PromptChoice;
use replica_core::refusal::Refusal;
use replica_core::scores;
use replica_core::wire::info::{TeiLabels, TeiModelType};

use crate::engine::{Description, Output};
use crate::model::{LabelHead, ModelDir, Pooling, Prompts, SentenceConfig};
use crate::tokenize::Reading;

/// What the model is for.
pub(crate) enum Purpose {
    /// It makes vectors.
    Embed(Embedding),
    /// It says numbers about labels; with one label it is a reranker.
    Label(Labelling),
}

/// A model that says numbers about labels.
pub(crate) struct Labelling {
    pub(crate) head: LabelHead,
    /// What it wants before each text, and of a pair before the first; that of a chat template is in the template.
    pub(crate) prompt: Option<Arc<str>>,
}

/// A model that makes vectors.
pub(crate) struct Embedding {
    /// Numbers of a vector that is served, which may be fewer than the engine makes.
    pub(crate) width: usize,
    /// Numbers of the row of a token.
    hidden: usize,
    /// What becomes of the engine's rows.
    sentence: SentenceConfig,
    /// Whether it may be meant to judge pairs, which nothing says; then it does not rank.
    is_bare: bool,
    /// Whether the engine has the rows of tokens as well.
    token_rows: bool,
    pooling: Pooling,
    prompts: Prompts,
    /// Whether the tokens of a prompt are pooled with the others.
    prompt_is_pooled: bool,
}

impl Purpose {
    /// That of a model on the engine that is described.
    pub(crate) fn of(model: &ModelDir, engine: &Description) -> Purpose {
        match &model.head {
            Some(head) => {
                let prompt = if model.template.is_some() { None } else { model.prompts.of_default() };
                let prompt = prompt.filter(|prompt| !prompt.is_empty()).map(Arc::from);
                Purpose::Label(Labelling { head: head.clone(), prompt })
            }
            None => Purpose::Embed(Embedding {
                width: model.sentence.served_width(engine.width),
                hidden: engine.hidden,
                token_rows: engine.token_rows,
                sentence: model.sentence.clone(),
                is_bare: model.is_bare,
                pooling: model.sentence.pooling,
                prompts: model.prompts.clone(),
                prompt_is_pooled: model.sentence.include_prompt,
            }),
        }
    }

    /// The model as one that embeds, which is `asked` of it.
    pub(crate) fn embedding(&self, asked: &str) -> Result<&Embedding, Refusal> {
        match self {
            Purpose::Embed(embedding) => Ok(embedding),
            Purpose::Label(_) => Err(Refusal::wrong_task(asked, &self.says(), "a model that embeds")),
        }
    }

    /// Refuses rows of tokens, which are `asked` of it, where its engine has none.
    pub(crate) fn token_rows(&self, asked: &str) -> Result<(), Refusal> {
        if self.embedding(asked)?.token_rows {
            return Ok(());
        }
        let is = "on an engine that was built for the rows of texts alone";
        Err(Refusal::wrong_task(asked, is, "an engine with the rows of tokens"))
    }

    /// The model as one that labels, which is `asked` of it.
    pub(crate) fn labels(&self, asked: &str) -> Result<&Labelling, Refusal> {
        match self {
            Purpose::Label(labelling) => Ok(labelling),
            Purpose::Embed(_) => {
                Err(Refusal::wrong_task(asked, &self.says(), "a model with a classification head"))
            }
        }
    }

    /// How it ranks, which is `asked` of it.
    pub(crate) fn ranker(&self, asked: &str) -> Result<Ranker<'_>, Refusal> {
        match self {
            Purpose::Embed(embedding) if embedding.is_bare => Err(Refusal::wrong_task(
                asked,
                "a language model without a head, of which nothing says whether it judges pairs",
                "a deployment whose `task` is stated: rerank if it judges pairs by its chat template, embed if its \
                 vectors are compared",
            )),
            Purpose::Embed(embedding) => Ok(Ranker::Similarity(embedding)),
            Purpose::Label(labelling) if labelling.ranks() => Ok(Ranker::CrossEncoder(labelling)),
            Purpose::Label(_) => {
                Err(Refusal::wrong_task(asked, &self.says(), "a reranker (one label) or a model that embeds"))
            }
        }
    }

    fn says(&self) -> String {
        match self {
            Purpose::Embed(_) => "one that embeds".to_owned(),
            Purpose::Label(labelling) if labelling.ranks() => "a reranker (one label)".to_owned(),
            Purpose::Label(Labelling { head, .. }) => format!("a classifier of {} labels", head.labels.len()),
        }
    }

    /// `task`, in the word of deployments.
    pub(crate) fn task(&self) -> &'static str {
        match self {
            Purpose::Embed(_) => "embed",
            Purpose::Label(labelling) if labelling.ranks() => "rerank",
            Purpose::Label(_) => "classify",
        }
    }

    /// How a rerank is answered, in a word.
    pub(crate) fn rerank(&self) -> &'static str {
        match self.ranker("") {
            Ok(Ranker::CrossEncoder(_)) => "cross-encoder",
            Ok(Ranker::Similarity(_)) => "similarity",
            Err(_) => "none",
        }
    }

    /// Numbers of a vector that is served, if it embeds.
    pub(crate) fn dimensions(&self) -> Option<usize> {
        match self {
            Purpose::Embed(embedding) => Some(embedding.width),
            Purpose::Label(_) => None,
        }
    }

    /// Its labels, if it has any.
    pub(crate) fn label_names(&self) -> &[String] {
        match self {
            Purpose::Embed(_) => &[],
            Purpose::Label(Labelling { head, .. }) => &head.labels,
        }
    }

    /// Its prompts, if it embeds.
    pub(crate) fn prompts(&self) -> Option<&Prompts> {
        match self {
            Purpose::Embed(embedding) => Some(&embedding.prompts),
            Purpose::Label(_) => None,
        }
    }

    /// How it makes one vector of tokens, in TEI's words.
    pub(crate) fn pooling(&self) -> Option<&'static str> {
        match self {
            Purpose::Embed(embedding) => Some(name(embedding.pooling)),
            Purpose::Label(_) => None,
        }
    }

    /// What TEI calls it.
    pub(crate) fn tei_model_type(&self) -> TeiModelType {
        match self {
            Purpose::Embed(embedding) => {
                TeiModelType::Embedding { pooling: name(embedding.pooling).to_owned() }
            }
            Purpose::Label(labelling) if labelling.ranks() => {
                TeiModelType::Reranker(TeiLabels::new(&labelling.head.labels))
            }
            Purpose::Label(Labelling { head, .. }) => TeiModelType::Classifier(TeiLabels::new(&head.labels)),
        }
    }
}

/// The name of a pooling in TEI's `/info`, or sentence-transformers' where TEI has none.
fn name(pooling: Pooling) -> &'static str {
    match pooling {
        Pooling::Mean => "mean",
        Pooling::Cls => "cls",
        Pooling::LastToken => "last_token",
        Pooling::WeightedMean => "weightedmean",
        Pooling::Max => "max",
        Pooling::MeanSqrtLength => "mean_sqrt_len_tokens",
    }
}

/// How a model ranks.
pub(crate) enum Ranker<'a> {
    /// It reads query and document together.
    CrossEncoder(&'a Labelling),
    /// It makes a vector of each, and the cosine between them is the answer.
    Similarity(&'a Embedding),
}

impl Labelling {
    /// Whether its one label says how well the two texts of a pair go together.
    pub(crate) fn ranks(&self) -> bool {
        self.head.labels.len() == 1
    }

    /// How the texts of a request are read.
    pub(crate) fn reading(&self, overlong: OverlongPolicy) -> Reading {
        Reading { prompt: self.prompt.clone(), overlong, most: None }
    }
}

impl Embedding {
    /// Numbers of a row of this output.
    pub(crate) fn width_of(&self, output: Output) -> usize {
        match output {
            Output::Pooled => self.width,
            Output::Tokens => self.hidden,
        }
    }

    /// What makes rows of `keep` numbers of the engine's rows, of which it is given the width: brought to length one or
    /// not, as a request or the replica says, or as the model does it.
    pub(crate) fn finish(
        &self,
        output: Output,
        keep: usize,
        normalize: Option<bool>,
    ) -> impl FnOnce(Vec<f32>, usize) -> Vec<f32> + Send + 'static {
        let (sentence, served) = (self.sentence.clone(), self.width_of(output));
        move |rows, width| {
            let own = normalize.is_none() && output == Output::Pooled;
            let (rows, width) = if own { (sentence.serve(rows, width), served) } else { (rows, width) };
            let mut rows = scores::shorten(rows, width, keep);
            // A vector of fewer numbers than the model's own is brought to length one again.
            let again = sentence.normalize && (!own || keep < served);
            if normalize.unwrap_or(again) {
                scores::normalize(&mut rows, keep);
            }
            rows
        }
    }

    /// What stands before each text of a request.
    pub(crate) fn prompt(&self, choice: &PromptChoice) -> Result<Option<Arc<str>>, Refusal> {
        let Prompts { by_name, default } = &self.prompts;
        match choice.resolve(by_name, default.as_deref())? {
            Some(prompt) if self.prompt_is_pooled => Ok(Some(Arc::from(prompt))),
            // Its tokens would have to be computed and then left out of the pool, which the engine cannot do; a vector
            // without the prompt would be another one, and nobody would see it.
            Some(_) => Err(Refusal::invalid(
                "prompt_name",
                "prompt_name",
                "or what stands for it chooses a prompt that this model leaves out of its vector (`include_prompt` is \
                 false), which is not supported here",
                "token ids",
            )),
            None => Ok(None),
        }
    }
}
